"""Signs of life: each process of a run counts in a small file in shared memory, which the node's monitor reads.

A file holds who the process is, two counters, and what it does. A thread of its own advances ``alive`` every second: it
runs as long as the process and its interpreter do. ``worked`` is advanced by the thread whose work the run waits for,
so it also shows that this thread does not hang in a driver. No file system but the node's memory takes part, so storage
that hangs stops no heartbeat. Imports no package.

The thread that beats also looks at the clock for the main thread: it ends what takes longer than its deadline
(``Heartbeat.within``).
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from or1_megatron.runtime.processes import start_ticks

BEAT_S: Final = 1.0
_HEAD: Final = struct.Struct("<qq64s")  # pid, its start in clock ticks since boot, who
_LIFE: Final = struct.Struct("<qqq160s")  # alive, worked (-1: never judged), long, doing
_BYTES: Final = _HEAD.size + _LIFE.size
_ALIVE, _WORKED, _LONG, _DOING = (_HEAD.size + offset for offset in (0, 8, 16, 24))
_COUNTER: Final = struct.Struct("<q")
_FRAMES: Final = 10


def beats_folder(run: str) -> Path:
    """Return the folder of a run's heartbeats on this node. ``run``: the run's name (``RunFolder.run_id``)."""
    return Path("/dev/shm", f"or1_beats_{os.getuid()}_{hashlib.blake2b(run.encode(), digest_size=8).hexdigest()}")


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process last said of itself."""

    pid: int
    started: int
    """Clock ticks since boot: with the pid it names one process for good."""
    who: str
    alive: int
    worked: int
    """-1: the process has no thread whose work is watched, or that thread waits for nothing now."""
    long: bool
    """It does something that is known to take long and that has a deadline elsewhere."""
    doing: str


class Heartbeat:
    """This process's signs of life, until ``close`` or the end of the process. Any thread may call its methods."""

    def __init__(self, folder: Path, who: str, doing: str = "starting", long: bool = True) -> None:
        """
        Args:
            folder: ``beats_folder`` of the run; made if missing.
            who: what people call the process, e.g. "rank 0".
            doing, long: as in ``says``.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / str(os.getpid())
        head = _HEAD.pack(os.getpid(), start_ticks(os.getpid()), who.encode()[:64])
        aside = self._path.with_suffix(".new")
        aside.write_bytes(head + _LIFE.pack(0, -1, 0, b""))
        with aside.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self.says(doing, long)
        aside.rename(self._path)
        self._due: tuple[float, Callable[[], None]] | None = None
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def says(self, doing: str, long: bool = False) -> None:
        """Say what the process does. ``long``: its deadline is another one than ``cluster.heartbeat_s``."""
        _COUNTER.pack_into(self._memory, _LONG, int(long))
        self._memory[_DOING:_BYTES] = doing.encode()[:160].ljust(160, b"\0")

    def worked(self) -> None:
        """Say that the watched thread has got on. From now on it must do so within ``cluster.heartbeat_s``."""
        (count,) = _COUNTER.unpack_from(self._memory, _WORKED)
        _COUNTER.pack_into(self._memory, _WORKED, count + 1 if count >= 0 else 1)

    @contextmanager
    def busy_with(self, doing: str) -> Iterator[None]:
        """Say that the process does something long during the block, and afterwards what it did before."""
        before = self._memory[_LONG:_BYTES]
        self.says(doing, long=True)
        try:
            yield
        finally:
            self._memory[_LONG:_BYTES] = before

    @contextmanager
    def within(self, deadline_s: float, late: Callable[[], None]) -> Iterator[None]:
        """Call ``late`` on the thread that beats if the block takes longer than ``deadline_s``. Blocks do not nest."""
        self.ends_within(deadline_s, late)
        try:
            yield
        finally:
            self._due = None

    def ends_within(self, deadline_s: float, late: Callable[[], None]) -> None:
        """As ``within``, for the rest of the process."""
        self._due = time.monotonic() + deadline_s, late

    def close(self) -> None:
        """End the signs of life: from now on nobody waits for them. A second call does nothing."""
        self._over.set()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(BEAT_S):
            count += 1
            _COUNTER.pack_into(self._memory, _ALIVE, count)
            due = self._due
            if due is not None and time.monotonic() > due[0]:
                due[1]()


def main_thread_stack() -> str:
    """Return the innermost frames of the main thread's stack, as text of several lines."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip() if frame else "(unknown)"


async def beat_on_loop(heart: Heartbeat) -> None:
    """Show that this asyncio loop runs, until the task is cancelled."""
    while True:
        heart.worked()
        await asyncio.sleep(BEAT_S)


def read_beats(folder: Path) -> list[Beat]:
    """Return the signs of life in the folder, those of processes that have ended included."""
    found = []
    for path in sorted(folder.glob("[0-9]*")):
        if path.suffix:
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # it has just ended
            continue
        if len(content) == _BYTES:
            pid, started, who = _HEAD.unpack_from(content)
            alive, worked, long, doing = _LIFE.unpack_from(content, _HEAD.size)
            found.append(Beat(pid, started, _text(who), alive, worked, bool(long), _text(doing)))
    return found


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")
