"""Waits for events in tests, with a deadline that only ends a hang."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 300.0
"""Default deadline: longer than any wait takes on a machine with busy cores, and shorter than pytest's own limit."""


def wait_until[T](condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.02) -> T:
    """Poll until ``condition()`` holds, and return its value.

    Raises:
        AssertionError: ``condition()`` does not hold after ``timeout_s``; the message names ``what`` was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(every_s)
    return value


def lives(pid: int) -> bool:
    """Return whether a process lives, running or stopped. A zombie does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
