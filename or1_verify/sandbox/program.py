"""The sandbox's interface: programs, limits and the rlimits made of them, results and exceptions.

    with Sandbox(SandboxLimits(cpu_s=5.0)) as sandbox:
        program = Program({"main.py": source, "case.json": case}, ("{python}", "{box}/main.py", "{box}/case.json"))
        result = sandbox.run(program, stdin=b"21\\n")  # or with limits=..., for this run only
        accepted = result.succeeded and result.output == b"42\\n"

Whatever a program does, ``run`` returns a SandboxResult. If the sandbox itself fails, ``run`` raises SandboxFailure (an
OSError), because nothing is then known about the program. Several threads may call ``run``. Every run gets new
processes, files and scratch space, all of which are gone when ``run`` returns.

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
"""exited: the program ended by itself or by a signal; others: it was killed because it exceeded this limit."""

SandboxTier = Literal["auto", "bubblewrap", "landlock", "weak"]

WALL_PER_CPU = 2.0
"""Ratio of a run's wall time limit to its CPU time limit."""

_STACK_BYTES = 128 << 20
"""Size of the main thread's stack, which cached recursive functions fill; Linux reserves at least as much below it."""

_CONFIG = VerifyConfig()
_EXCEEDED = {
    "cpu_time": "used more than",
    "wall_time": "not done within",
    "memory": "used more than",
    "output": "wrote more than",
}


class SandboxUnavailable(UserError, RuntimeError):
    """This machine cannot run untrusted code safely; the message says what does not work and what to install."""


class SandboxFailure(UserError, OSError):
    """The sandbox of one run failed, not its program: it did not start, or the machine ran out of a resource."""


class SessionEnded(Or1Error):
    """A program that answers line by line gave no answer, because it ended or met the limit that the message names."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command and the files that it may read. The program can see all of them, so they must hold no secrets.

    ``files``: content by name (without folders), read-only in a folder of their own. In ``command``, ``{box}`` stands
    for this folder and ``{python}`` for the sandbox's interpreter. The working directory is the scratch space.
    ``tool``: a trusted program, such as a compiler, which may start processes and write scratch files in every tier.
    Submissions may do neither in a tier without namespaces: ``os.fork`` then raises PermissionError.
    """

    files: Mapping[str, bytes]
    command: tuple[str, ...]
    executable: AbstractSet[str] = field(default_factory=frozenset)
    tool: bool = False


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one run. A limit that the section ``verify`` can set has the default of that section.

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
    """Configuration key of each limit ("cpu_time", "memory", ...), for messages; a limit without a key is fixed."""

    def rlimits(self, in_cgroup: bool) -> dict[str, int]:
        """Return the resource limits of each process, by the names of the module ``resource``.

        ``in_cgroup``: a cgroup also limits the number of processes, and must be the first to refuse, as it counts that.
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
        """Return in words a limit's name, value and configuration key, if it has one."""
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
        """Return in words why a run failed, with the limit that it met; "" if it succeeded.

        ``errors``: the program's standard error. ``refused``: the kernel refused the program a process or a thread.
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
    """The result of one run: ``output`` is its standard output (capped), ``errors`` the end of its standard error.

    ``exit_status``: 128 + n for a death by signal n. ``cpu_s``: CPU time of all its processes that were waited for.
    ``failure``: in words why the run failed; "" if it succeeded.
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
