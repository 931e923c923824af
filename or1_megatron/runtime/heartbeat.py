"""Heartbeats: each process of a run advances counters in a small file in shared memory, which the watchdog reads.

A file holds one ``Beat``. The heartbeat thread advances ``alive`` every second, as long as the process and its
interpreter run. The thread whose work the run waits for advances ``worked``, which shows that this thread does not
hang in a driver. Heartbeats go on when storage hangs, because the files are in the node's memory, and when this memory
is full, because a file has its final size from the start. This module needs no third-party package.

The heartbeat thread also enforces deadlines of the main thread (``Heartbeat.within``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from or1_megatron.runtime.files import naming_disk_full
from or1_megatron.runtime.processes import start_ticks
from or1_megatron.runtime.timeline import join

BEAT_S: Final = 1.0
_BYTES: Final = 1024
_WORDS: Final = 100
"""Largest number of characters of ``who``, and of ``doing``."""
_FRAMES: Final = 10


def beats_folder(run: str) -> Path:
    """Return the folder of a run's heartbeats on this node. ``run``: the run's name (``RunFolder.run_id``)."""
    return Path("/dev/shm", f"or1_beats_{os.getuid()}_{hashlib.blake2b(run.encode(), digest_size=8).hexdigest()}")


@dataclass(frozen=True, slots=True)
class Beat:
    """The last state that a process wrote about itself."""

    pid: int
    started: int
    """Clock ticks from boot to the process's start. No two processes have the same ``pid`` and ``started``."""
    who: str
    alive: int = 0
    worked: int = -1
    """How often the watched thread has called ``Heartbeat.worked``; -1: never so far, so it is not watched yet."""
    long: bool = True
    """Whether the process does something known to take long. Its deadline is then not ``cluster.heartbeat_s``."""
    doing: str = "starting"


class Heartbeat:
    """This process's heartbeat. Any thread may call the methods."""

    def __init__(self, folder: Path, who: str, doing: str = "starting", long: bool = True) -> None:
        """
        Args:
            folder: ``beats_folder`` of the run; it is made if missing.
            who: the process's name in messages, such as "rank 0".
            doing, long: the arguments of the first call of ``says``.
        """
        join(who)
        path = folder / str(os.getpid())
        aside = path.with_suffix(".new")
        with naming_disk_full(aside, "the process's signs of life"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock, self._worked = threading.Lock(), -1
        self._beat = Beat(os.getpid(), start_ticks(os.getpid()), who[:_WORDS])
        self.says(doing, long)
        aside.rename(path)
        self._due: tuple[float, Callable[[], None]] | None = None
        threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True).start()

    def says(self, doing: str, long: bool = False) -> None:
        """Write what the process does now. ``long``: another deadline than ``cluster.heartbeat_s`` applies."""
        self._write(doing=doing[:_WORDS], long=long)

    def worked(self) -> None:
        """Show in the next beat that the watched thread advanced. Call this every ``cluster.heartbeat_s`` or sooner."""
        self._worked = max(self._worked, 0) + 1

    @contextmanager
    def busy_with(self, doing: str) -> Iterator[None]:
        """Write that the process does something long during the block; restore the earlier text afterwards."""
        before = self._beat
        self.says(doing, long=True)
        try:
            yield
        finally:
            self.says(before.doing, before.long)

    @contextmanager
    def within(self, deadline_s: float, late: Callable[[], None]) -> Iterator[None]:
        """Call ``late`` on the heartbeat thread if the block takes longer than ``deadline_s``. Blocks must not nest."""
        self.ends_within(deadline_s, late)
        try:
            yield
        finally:
            self._due = None

    def ends_within(self, deadline_s: float, late: Callable[[], None]) -> None:
        """Call ``late`` on the heartbeat thread if the process still runs after ``deadline_s``."""
        self._due = time.monotonic() + deadline_s, late

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._beat = replace(self._beat, worked=self._worked, **changes)
            os.pwrite(self._file, json.dumps(asdict(self._beat), ensure_ascii=False).encode().ljust(_BYTES), 0)

    def _keep_beating(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._write(alive=self._beat.alive + 1)
            due = self._due
            if due is not None and time.monotonic() > due[0]:
                due[1]()


def main_thread_stack() -> str:
    """Return the innermost frames of the main thread's stack, as text of several lines."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip() if frame else "(unknown)"


async def beat_on_loop(heart: Heartbeat) -> None:
    """Advance ``worked`` every second while this asyncio loop runs, until the task is cancelled."""
    while True:
        heart.worked()
        await asyncio.sleep(BEAT_S)


def read_beats(folder: Path) -> list[Beat]:
    """Return the heartbeats in the folder, including those of processes that have ended."""
    beats = []
    for path in sorted(path for path in folder.glob("*") if path.name.isdigit()):
        try:
            beats.append(Beat(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # the process has just ended, or is just writing
            continue
    return beats
