"""The limits of one sandboxed run, their rlimits, and the message of a run that met one.

``sandbox.open_sandbox`` makes the limits from the configuration; ``code.run_tests`` applies those that a problem sets.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from or1_verify.child_process import describe_exit
from or1_verify.config import VerifyConfig

Ending = Literal["exited", "cpu_time", "wall_time", "memory", "output"]
"""exited: the program ended by itself or by a signal. Others: the program was killed because it exceeded this limit."""

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

        ``in_cgroup``: a cgroup also limits the number of processes. The cgroup must refuse first: it counts refusals.
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


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
