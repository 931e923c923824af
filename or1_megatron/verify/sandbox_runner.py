"""The first program inside every sandbox: confines itself and becomes the program that is to be run.

It is given to the sandbox as a file and never imported by us. Standard library only, and little of it: it is started
once per run. argv: the JSON of {rlimits: {name: value}, gate: descriptor, python: path}, then the program's command.
The limits are hard ones: an unprivileged process cannot raise them again. At the gate, a socket, it says that it is
ready, waits for the word, and closes it. A command that is this same Python with a file is run in this process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from types import ModuleType


def limit(limits: dict[str, int]) -> None:
    """limits: {RLIMIT name: value}."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


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
    specification = json.loads(sys.argv[1])
    command = sys.argv[2:]
    limit(specification["rlimits"])
    os.write(specification["gate"], b"r")
    if os.read(specification["gate"], 1) != b"g":
        os._exit(1)
    os.close(specification["gate"])
    if command[0] == specification["python"]:
        run_here(command[1], command[2:])
    else:
        os.execv(command[0], command)


main()
