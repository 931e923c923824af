"""The first program inside every sandbox: confines itself and becomes the program that is to be run.

It is given to the sandbox as a file and never imported by us. It imports as little as it can: it is started once per
run. argv: the descriptor of the gate, resource limits as "NAME=value,...", then the program's command. The limits are
hard ones: an unprivileged process cannot raise them again. At the gate, a socket, it says that it is ready, waits for
the word, and closes it. A command that is this same Python with a file is run in this process.
"""

from __future__ import annotations

import os
import resource
import sys
from types import ModuleType


def limit(limits: str) -> None:
    for entry in limits.split(","):
        name, _, value = entry.partition("=")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))


def run_here(path: str, arguments: list[str]) -> None:
    """What ``python path *arguments`` would do, without starting Python again."""
    with open(path, "rb") as file:
        source = file.read()
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    main_module = ModuleType("__main__")
    main_module.__dict__["__file__"] = path
    sys.modules["__main__"] = main_module  # what the program pickles or looks up is its own
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def main() -> None:
    gate, limits, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    limit(limits)
    os.write(gate, b"r")
    if os.read(gate, 1) != b"g":
        os._exit(1)
    os.close(gate)
    if command[0] == sys.executable and not command[1].startswith("-"):
        run_here(command[1], command[2:])
    else:
        os.execv(command[0], command)


main()
