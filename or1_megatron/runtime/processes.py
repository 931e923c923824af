"""Reads processes from Linux's /proc: their descendants, states (stopped, asleep, waiting) and CPU times.

This module imports no third-party package, because small programs use it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")

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
    """The content of /proc/PID/stat. No two processes have the same ``pid`` and ``started``."""

    pid: int
    started: int
    """Clock ticks since boot."""
    parent: int
    state: str
    """A key of STATES, or another letter of proc(5)."""
    name: str


def read_process(pid: int) -> Process | None:
    """Return a process; None if it has ended."""
    if not (text := _read(Path(_PROC, str(pid), "stat"))):
        return None
    name, _, rest = text.partition(" (")[2].rpartition(") ")
    fields = rest.split()
    return Process(pid, int(fields[19]), int(fields[1]), fields[0], name)


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since boot. Raises ProcessLookupError."""
    process = read_process(pid)
    if process is None:
        raise ProcessLookupError(f"no process {pid}")
    return process.started


def all_processes() -> dict[int, Process]:
    """Return every process that can be read, by pid."""
    pids = [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def descendants(roots: Collection[int], of: Mapping[int, Process]) -> list[Process]:
    """Return the descendants of the processes ``roots`` among the processes ``of``, without the roots themselves."""
    children: dict[int, list[Process]] = {}
    for process in of.values():
        children.setdefault(process.parent, []).append(process)
    below: dict[int, Process] = {}
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child.pid not in below and child.pid not in roots:
                below[child.pid] = child
                waiting.append(child.pid)
    return list(below.values())


def command_line(pid: int) -> list[str]:
    """Return a process's command line as a list of arguments; [""] if the process has ended."""
    return _read(Path(_PROC, str(pid), "cmdline")).rstrip("\0").split("\0")


def thread_times_ns(pid: int) -> dict[int, int]:
    """Return the CPU time of each thread of a process, by thread id, from schedstat; {} if the process has ended."""
    files = Path(_PROC, str(pid), "task").glob("*/schedstat")
    return {int(file.parent.name): int(text.split()[0]) for file in files if (text := _read(file))}


def runnable(pid: int) -> bool:
    """Return whether a thread of the process runs or waits for a core now."""
    files = Path(_PROC, str(pid), "task").glob("*/stat")
    return any(_read(file).rpartition(") ")[2].startswith("R") for file in files)


def _read(file: Path) -> str:
    """Return a file's content; "" if its process or thread has ended, or if we may not read the file."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
