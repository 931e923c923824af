"""What Linux says of processes in /proc: who descends from whom, whether one is stopped, starved or asleep, its stacks.

Imports no package: programs that must be small use it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_STACK_S: Final = 3.0

STATES: Final[Mapping[str, str]] = {
    "R": "runnable",
    "S": "asleep",
    "D": "waiting for a disk, a device or memory",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
}


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/PID/stat. ``pid`` and ``started`` together name one process for good."""

    pid: int
    started: int
    """Clock ticks since boot."""
    parent: int
    state: str
    """A key of STATES, or another letter of proc(5)."""
    name: str


def read_process(pid: int) -> Process | None:
    """Return a process; None if it has ended."""
    try:
        text = Path(_PROC, str(pid), "stat").read_text(errors="replace")
    except (OSError, ProcessLookupError):
        return None
    name, _, rest = text.partition(" (")[2].rpartition(") ")
    fields = rest.split()
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], name)


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since boot. Raises ProcessLookupError."""
    found = read_process(pid)
    if found is None:
        raise ProcessLookupError(f"no process {pid}")
    return found.started


def all_processes() -> dict[int, Process]:
    """Return every process that can be read, by pid."""
    pids = [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]
    return {pid: found for pid in pids if (found := read_process(pid)) is not None}


def descendants(roots: Collection[int], of: Mapping[int, Process]) -> list[Process]:
    """Return the processes below ``roots``, these excluded."""
    children: dict[int, list[Process]] = {}
    for process in of.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child.pid not in found and child.pid not in roots:
                found[child.pid] = child
                waiting.append(child.pid)
    return list(found.values())


def command_line(pid: int) -> list[str]:
    """Return a process's arguments; none if it has ended."""
    try:
        return Path(_PROC, str(pid), "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except (OSError, ProcessLookupError):
        return []


@dataclass(frozen=True, slots=True)
class CoreTime:
    """What the busiest thread of a process got of the cores over some time, in seconds."""

    ran_s: float
    waited_s: float
    """It could have run, and others had the core; a wait that has not ended is not counted."""


ThreadTimes = Mapping[int, tuple[int, int]]
"""Nanoseconds that each thread has run, and has waited for a core."""


def thread_times(pid: int) -> dict[int, tuple[int, int]]:
    """Return the times of a process's threads, from /proc/PID/task/TID/schedstat; none if it has ended."""
    times = {}
    for file in Path(_PROC, str(pid), "task").glob("*/schedstat"):
        try:
            ran, waited, _ = file.read_text().split()
        except (OSError, ValueError):  # the thread has ended
            continue
        times[int(file.parent.name)] = (int(ran), int(waited))
    return times


def runnable(pid: int) -> bool:
    """Return whether a thread of the process runs or waits for a core now.

    The kernel adds a wait to schedstat when the wait ends. A thread that has had no core at all shows none there.
    """
    for file in Path(_PROC, str(pid), "task").glob("*/stat"):
        try:
            state = file.read_text(errors="replace").rpartition(") ")[2][:1]
        except (OSError, ProcessLookupError):  # the thread has ended
            continue
        if state == "R":
            return True
    return False


def core_time_between(before: ThreadTimes, after: ThreadTimes) -> CoreTime:
    """Return the busiest thread's share; a thread that started in between counts from its start."""
    zero = (0, 0)
    deltas = [
        (now[0] - before.get(thread, zero)[0], now[1] - before.get(thread, zero)[1]) for thread, now in after.items()
    ]
    if not deltas:
        return CoreTime(0.0, 0.0)
    return CoreTime(max(ran for ran, _ in deltas) / 1e9, max(waited for _, waited in deltas) / 1e9)


def stacks(pid: int) -> str:
    """Return where a process's threads are: from py-spy if it is installed, else what the kernel says; or why not."""
    said = []
    if (py_spy := shutil.which("py-spy")) is not None:
        try:
            command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_STACK_S, check=False)
            if done.returncode == 0:
                return done.stdout
            said.append(f"py-spy failed: {done.stderr.strip()}")
        except subprocess.TimeoutExpired:
            said.append(f"py-spy gave no stack within {_STACK_S:g} s")
    else:
        said.append("py-spy is not installed, so this is where its threads are in the kernel")
    for task in sorted(Path(_PROC, str(pid), "task").glob("[0-9]*")):
        said.append(" ".join(f"{name}={_read(task / name)}" for name in ("comm", "wchan", "syscall", "stack")))
    return "\n".join(said)


def waits_in(pid: int) -> str:
    """Return the kernel function that the main thread sleeps in; empty if it is not known."""
    where = _read(Path(_PROC, str(pid), "wchan"))
    return "" if where in ("0", "") or where.startswith("(") else where


def _read(file: Path) -> str:
    try:
        return " < ".join(line.removeprefix("[<0>] ") for line in file.read_text().splitlines())
    except OSError as error:
        return f"({error.strerror or error})"
