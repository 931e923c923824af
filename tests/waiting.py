"""How tests wait: for an event, with a deadline that only ends a hang."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 300.0
"""Longer than any wait here takes on a machine whose cores are busy with other work. pytest's own limit is longer."""


def wait_until[T](condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.02) -> T:
    """Poll until ``condition()`` holds, and return its value.

    Raises:
        AssertionError: it does not hold after ``timeout_s``; the message names ``what`` was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(every_s)
    return value


def lives(pid: int) -> bool:
    """Return whether the process is there, stopped ones included; one that only waits for its parent's look is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
