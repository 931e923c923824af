"""The first program inside every sandbox: sets the given limits (rlimits), confines itself, then runs the program.

The sandbox gets this file's text; no module imports it. The file starts once per run, so it imports little.
Its argument is the descriptor of the gate, a socket. From the gate it reads its instructions, a marshalled dict:
``rlimits`` {name: value}, ``command``, and ``lock`` for a tier that confines from inside. Then it writes to the gate
that it is ready, waits for an answer and closes the gate. The limits are hard limits, which an unprivileged process
cannot raise again. If the command is this same Python with a file, the file runs in this process.
"""

from __future__ import annotations

import builtins
import io
import marshal
import os
import resource
import site
import sys
from types import ModuleType

TYPE_CHECKING = False  # importing typing would take time
if TYPE_CHECKING:
    from typing import Any

STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def lock(to: dict[str, Any]) -> None:
    """Confine this process for good: it dies with its parent, gains no rights by exec, obeys seccomp and Landlock.

    ``to`` has ``parent`` (pid), ``filter`` (a seccomp program), and for Landlock ``attributes`` (of the ruleset, 64
    bits each) and ``rules`` [(path, rights)]. The numbers are from linux/prctl.h and linux/landlock.h.
    """
    import ctypes
    import struct

    def call(function: Any, *arguments: Any) -> int:
        result: int = function(*arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{arguments[0]}: {os.strerror(ctypes.get_errno())}")
        return result

    libc = ctypes.CDLL(None, use_errno=True)
    call(libc.prctl, 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != to["parent"]:
        os._exit(1)
    call(libc.prctl, 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if "rules" in to:
        attributes = struct.pack(f"={len(to['attributes'])}Q", *to["attributes"])
        ruleset = call(libc.syscall, 444, attributes, ctypes.c_size_t(len(attributes)), 0)
        for path, rights in to["rules"]:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            call(libc.syscall, 445, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
            os.close(descriptor)
        call(libc.syscall, 446, ruleset, 0)
        os.close(ruleset)
    code = ctypes.create_string_buffer(to["filter"], len(to["filter"]))
    header = struct.pack("HP", len(to["filter"]) // 8, ctypes.addressof(code))
    call(libc.prctl, 22, 2, header, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def set_up_site() -> None:
    """Set up packages' folders, ``exit`` and ``help`` as Python does without ``-S``, but run no .pth files."""
    sys.path += filter(os.path.isdir, site.getsitepackages())
    site.setquit()
    site.setcopyright()
    site.sethelper()


def open_streams(open_path: Any) -> Any:
    """Return ``open_path``, changed to open /dev/stdin, /dev/stdout and /dev/stderr without a /proc."""

    def opened(file: Any, *arguments: Any, **keywords: Any) -> Any:
        name = os.fspath(file) if hasattr(file, "__fspath__") else file
        stream = STREAMS.get(name) if isinstance(name, str) else None
        return open_path(file if stream is None else os.dup(stream), *arguments, **keywords)

    return opened


def lift_c_recursion_limit() -> None:
    """Let this thread's recursion through C, as in cached functions, go as deep as the thread's stack.

    CPython 3.12 and 3.13 stop it at a fixed depth, which honest programs exceed; other versions do not count it.
    In the thread's state, the number of calls left is stored after the recursion limit (Include/cpython/pystate.h).
    """
    if not (3, 12) <= sys.version_info < (3, 14):
        return
    import ctypes

    limit, mark = sys.getrecursionlimit(), 987_654
    sys.setrecursionlimit(mark)
    ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
    state = (ctypes.c_int * 32).from_address(ctypes.pythonapi.PyThreadState_Get())
    behind = list(state).index(mark) + 1
    if 0 < state[behind] <= 10_000:
        state[behind] = 1_000_000
    sys.setrecursionlimit(limit)


def lift_in_threads() -> None:
    """Make every thread that is started later call ``lift_c_recursion_limit`` first."""
    import _thread

    def lifted(start: Any) -> Any:
        def started(function: Any, *arguments: Any, **keywords: Any) -> Any:
            def run(*given: Any, **named: Any) -> None:
                lift_c_recursion_limit()
                function(*given, **named)

            return start(run, *arguments, **keywords)

        return started

    for name in {"start_new_thread", "start_joinable_thread"} & vars(_thread).keys():
        setattr(_thread, name, lifted(getattr(_thread, name)))


def run_here(path: str, arguments: list[str]) -> None:
    """Run a file as ``python path *arguments`` would, but in this process, and with no limit on an integer's digits."""
    with open(path, "rb") as file:
        source = file.read()
    sys.argv = [path, *arguments]
    sys.set_int_max_str_digits(0)
    lift_c_recursion_limit()
    lift_in_threads()
    builtins.open = io.open = open_streams(io.open)
    sys.path.insert(0, os.path.dirname(path))
    main_module = ModuleType("__main__")
    main_module.__dict__["__file__"] = path
    sys.modules["__main__"] = main_module  # what the program pickles or looks up is found in it
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def main() -> None:
    gate = int(sys.argv[1])
    instructions = marshal.loads(os.read(gate, 1 << 20))
    for name, value in instructions["rlimits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (most, most))
    if instructions["lock"]:
        lock(instructions["lock"])
    os.write(gate, b"r")
    if os.read(gate, 1) != b"g":
        os._exit(1)
    os.closerange(3, 1 << 20)  # the gate, and anything else that was left open
    command = instructions["command"]
    if command[0] == sys.executable and not command[1].startswith("-"):
        set_up_site()
        run_here(command[1], command[2:])
    else:
        os.execv(command[0], command)


main()
