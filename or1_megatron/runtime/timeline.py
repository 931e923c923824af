"""The timeline of a run (``track.timeline``): each process writes what it does, from when to when, to its own file.

``RUN/timeline/HOST-WHO-PID.jsonl`` begins with a row about the process. Each further row has spans that have ended.
Times are in ns since the epoch, by the host's clock. Spans named ``clocks`` say how far the clock is ahead of rank 0's.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from or1_megatron.runtime.jsonl import JsonlWriter

VARIABLE: Final = "OR1_TIMELINE"  # the timeline's folder, which processes inherit; unset or empty: there is none
_EVERY_S: Final = 1.0
_SHORT_NS: Final = 10_000  # shorter spans are left out
_MOST: Final = 1 << 20  # spans in memory, if the disk hangs; the oldest are dropped

_spans: deque[tuple[str, str, int, int, dict[str, Any]]] | None = None
_pid = 0  # of the process that records ``_spans``; a fork's is another


@contextmanager
def span(name: str, **args: Any) -> Iterator[dict[str, Any]]:
    """Record the block, or each call of a function that this decorates. The block may add to the yielded ``args``.

    JSON must be able to express ``args``. The argument ``waits_for`` says that the process waits, and for whom.
    """
    start_ns = time.time_ns()
    try:
        yield args
    finally:
        add(name, start_ns, time.time_ns(), **args)


def add(name: str, start_ns: int, end_ns: int, /, **args: Any) -> None:
    """Record a span that has been timed already."""
    if _spans is not None and end_ns - start_ns > _SHORT_NS:
        _spans.append((name, threading.current_thread().name, start_ns, end_ns, args))


def join(who: str) -> None:
    """Record this process's spans, under the name ``who``, if the run has a timeline. A second call does nothing."""
    global _spans, _pid
    if not os.environ.get(VARIABLE) or _pid == os.getpid():
        return
    _pid, _spans = os.getpid(), deque(maxlen=_MOST)
    path = Path(os.environ[VARIABLE], f"{socket.gethostname()}-{who.replace(' ', '_')}-{_pid}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = JsonlWriter(path, "the timeline")
    writer.write({"who": who, "host": socket.gethostname(), "pid": _pid})
    threading.Thread(target=_keep_writing, args=(writer, _spans), name="timeline", daemon=True).start()
    atexit.register(_write, writer, _spans)


def _keep_writing(writer: JsonlWriter, spans: deque[Any]) -> None:
    while True:  # an error, as of a full disk, ends this thread alone
        time.sleep(_EVERY_S)
        _write(writer, spans)


def _write(writer: JsonlWriter, spans: deque[Any]) -> None:
    if ended := [spans.popleft() for _ in range(len(spans))]:
        writer.write({"spans": ended})
