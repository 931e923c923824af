"""Decides a sandboxed run's limits (memory, time, processes, files), and names the limit that a run has met."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from or1_verify.child_process import describe_exit
from or1_verify.config import VerifyConfig

Ending = Literal["exited", "cpu_time", "wall_time", "memory", "output"]
"""How a program ended. exited: by itself or by a signal. Any other value: it was killed for exceeding that limit."""

WALL_PER_CPU = 2.0
"""Ratio of a run's wall time limit to its CPU time limit."""

_STACK_BYTES = 128 << 20
"""Size of the main thread's stack, which cached recursive functions fill. Linux always keeps this much room for it."""

_CONFIG = VerifyConfig()
_EXCEEDED = {
    "cpu_time": "used more than",
    "wall_time": "not done within",
    "memory": "used more than",
    "output": "wrote more than",
}


@dataclass(frozen=True, slots=True)
class ProblemLimits:
    """The limits that a problem sets for each test of a submission. None means that the configuration's limit holds."""

    time_s: float | None = None
    """CPU time limit. The wall time limit is ``WALL_PER_CPU`` times as long."""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one run. A limit that the section ``verify`` can set has the default of that section.

    ``cpu_s`` is the time limit. ``wall_s`` bounds programs that sleep, and leaves room on a busy machine.
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
    most_memory_bytes: int | None = None
    """Largest memory limit that a problem may set; None: no bound."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Name of a limit ("cpu_time", "memory", ...) -> its configuration key, for messages. Fixed limits have no key."""

    def for_problem(self, own: ProblemLimits) -> SandboxLimits:
        """Return these limits, overridden by those that a problem sets; memory is at most ``most_memory_bytes``."""
        limits, keys = self, dict(self.keys)
        if own.time_s is not None:
            keys |= {"cpu_time": "the row's limits.time_s", "wall_time": f"{WALL_PER_CPU:g} x the row's limits.time_s"}
            limits = replace(limits, cpu_s=own.time_s, wall_s=WALL_PER_CPU * own.time_s, keys=keys)
        if own.memory_bytes is not None:
            most = self.most_memory_bytes or own.memory_bytes
            keys["memory"] = "the row's limits.memory_bytes" if own.memory_bytes <= most else "verify.node_memory_bytes"
            limits = replace(limits, memory_bytes=min(own.memory_bytes, most), keys=keys)
        return limits

    def for_test_program(self, budget_s: float) -> SandboxLimits:
        """Return these limits with ``verify.budget_s`` as CPU time, because a test program makes many calls."""
        return replace(self, cpu_s=budget_s, keys={**self.keys, "cpu_time": "verify.budget_s"})

    def rlimits(self, in_cgroup: bool) -> dict[str, int]:
        """Return the resource limits of each process, by the names of the module ``resource``.

        ``in_cgroup``: a cgroup also limits the number of processes. The cgroup must refuse first, because only cgroups
        count refusals.
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
        """Return a limit in words: its name, its value, and its configuration key if it has one."""
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


def node_memory_bytes(config: VerifyConfig) -> int:
    """Return the memory limit of all untrusted programs on this node together; by default half of the memory."""
    return config.node_memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def configured_limits(config: VerifyConfig, in_cgroup: bool) -> SandboxLimits:
    """Return the limits of a run that the section ``verify`` sets.

    Without cgroups nothing limits the memory of all programs together, so the node's limit is divided among workers.
    """
    most_bytes, most_key = node_memory_bytes(config), "verify.node_memory_bytes"
    if not in_cgroup:
        most_bytes, most_key = most_bytes // config.workers, f"{most_key} / verify.workers"
    return SandboxLimits(
        cpu_s=config.timeout_s,
        wall_s=WALL_PER_CPU * config.timeout_s,
        memory_bytes=min(config.memory_bytes, most_bytes),
        processes=config.processes,
        most_memory_bytes=most_bytes,
        keys={
            "cpu_time": "verify.timeout_s",
            "wall_time": f"{WALL_PER_CPU:g} x verify.timeout_s",
            "memory": "verify.memory_bytes" if config.memory_bytes <= most_bytes else most_key,
            "processes": "verify.processes",
        },
    )


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
