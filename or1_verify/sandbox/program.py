"""What verifiers give to the sandbox and get from it: programs, limits (rlimits), results, exceptions.

    with Sandbox(SandboxLimits(cpu_s=5.0)) as sandbox:
        program = Program({"main.py": source, "case.json": case}, ("{python}", "{box}/main.py", "{box}/case.json"))
        result = sandbox.run(program, stdin=b"21\\n")  # or with limits=..., for this run only
        accepted = result.succeeded and result.output == b"42\\n"

Whatever the program does gives a SandboxResult. When the sandbox itself fails, ``run`` raises SandboxFailure (an
OSError), because nothing is then known about the program. Several threads may call ``run``. Every run gets fresh
processes, files and scratch space, and nothing of it is left when ``run`` returns.

``with sandbox.open(program) as session: session.ask(b"line")`` keeps one program running and talks to it line by line.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

from or1_verify.child_process import describe_exit
from or1_verify.config import VerifyConfig
from or1_verify.errors import Or1Error, UserError

Ending = Literal["exited", "cpu_time", "wall_time", "memory", "output"]
"""exited: it ended by itself or by a signal. The others: it was killed for exceeding that limit."""

SandboxTier = Literal["auto", "bubblewrap", "landlock", "weak"]

WALL_PER_CPU = 2.0
"""A run's wall time limit is this many times its CPU time limit."""

_STACK_BYTES = 128 << 20
"""The main thread's stack: cached recursive functions fill it; Linux keeps at least so much room below it."""

_CONFIG = VerifyConfig()
_EXCEEDED = {
    "cpu_time": "used more than",
    "wall_time": "not done within",
    "memory": "used more than",
    "output": "wrote more than",
}


class SandboxUnavailable(UserError, RuntimeError):
    """This machine cannot run untrusted code safely; the message says what to install and what does not work."""


class SandboxFailure(UserError, OSError):
    """The sandbox of one run failed: it did not start, or the machine, not the program, ran out of something."""


class SessionEnded(Or1Error):
    """A program that answers line by line gave no answer: it ended or met a limit. The message says which."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command and the files that it may read. It can see all of this, so nothing here may be secret.

    ``files``: name (no folders) to content, read-only in a folder of their own. In ``command``, ``{box}`` stands for
    that folder and ``{python}`` for the sandbox's interpreter. The working directory is the scratch space.
    ``tool``: a program of ours, such as a compiler, that may start processes and write scratch files in every tier.
    Submissions may do neither where there are no namespaces: ``os.fork`` then raises PermissionError.
    """

    files: Mapping[str, bytes]
    command: tuple[str, ...]
    executable: AbstractSet[str] = field(default_factory=frozenset)
    tool: bool = False


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one run. Those that the configuration's section ``verify`` sets have their defaults there.

    ``cpu_s`` is the time limit; ``wall_s`` bounds programs that sleep, and leaves room on a busy machine.
    ``memory_bytes`` bounds each process's address space (the recipe allows 50 GB) and, with cgroups, the whole sandbox.
    """

    cpu_s: float = _CONFIG.timeout_s
    wall_s: float = WALL_PER_CPU * _CONFIG.timeout_s
    memory_bytes: int = _CONFIG.memory_bytes
    processes: int = _CONFIG.processes
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    open_files: int = 128
    output_bytes: int = 16 << 20
    keys: Mapping[str, str] = field(default_factory=dict)
    """The configuration key of each limit ("cpu_time", "memory", ...), for messages. Limits without one are fixed."""

    def rlimits(self, in_cgroup: bool) -> dict[str, int]:
        """Return the limits of each process, by the names of the ``resource`` module.

        ``in_cgroup``: a cgroup limits the number of processes and counts what it refuses, so it must refuse first.
        """
        return {
            "RLIMIT_CPU": math.ceil(self.cpu_s)
            + 1,  # our own clock comes first and is exact, but it sees one process only
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_STACK": min(_STACK_BYTES, self.memory_bytes),
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NPROC": self.processes + in_cgroup,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }

    def named(self, limit: str) -> str:
        """Return a limit's name, its value and, where it has one, its key."""
        words = {
            "cpu_time": f"CPU time limit of {self.cpu_s:g} s",
            "wall_time": f"wall time limit of {self.wall_s:g} s",
            "memory": f"memory limit of {_size(self.memory_bytes)}",
            "output": f"output limit of {_size(self.output_bytes)}",
            "file": f"file size limit of {_size(self.file_bytes)}",
            "processes": f"limit of {self.processes} processes and threads",
        }[limit]
        return f"{words} ({self.keys[limit]})" if limit in self.keys else words

    def failure(self, ending: Ending, status: int, errors: str, refused: bool = False) -> str:
        """Say why a run did not end well, naming the limit that it met; "" when it ended well.

        ``errors`` is what it wrote to standard error. ``refused``: the kernel refused it a process or a thread.
        """
        if ending != "exited":
            return f"killed: {_EXCEEDED[ending]} the {self.named(ending)}"
        if status == 0:
            return ""
        last_line = (errors.strip().splitlines() or [""])[-1][:200]
        words = describe_exit(status)
        if status == 128 + signal.SIGXFSZ:
            words += f", the signal for exceeding the {self.named('file')}"
        elif status == 128 + signal.SIGKILL and not refused:
            words += "; no limit of ours was reached"
        words += f": {last_line}" if last_line else ""
        if "MemoryError" in last_line or "bad_alloc" in last_line:
            words += f" (each process has a {self.named('memory')})"
        return f"{words} (met the {self.named('processes')})" if refused else words


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How one run ended. ``output`` is its standard output, capped; ``errors`` is the end of its standard error.

    ``exit_status``: 128 + n for a death by signal n. ``cpu_s``: of all its processes that were waited for.
    ``failure``: why it did not end well, in words; "" when it did.
    """

    ending: Ending
    exit_status: int
    output: bytes
    errors: str
    cpu_s: float
    failure: str

    @property
    def succeeded(self) -> bool:
        return not self.failure


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
