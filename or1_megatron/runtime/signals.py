"""Being told to stop: SIGTERM and SIGUSR1 (pre-emption) ask for a save and an exit within a grace period.

The C-level handler of Python writes the signal's number to a pipe even while the main thread sits in a collective, so
a watcher thread reading the pipe sees every signal at once; a plain Python handler would run only after the
collective returned, and the grace period would never end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEAT_S = 2.0
"""A signal this soon after the first is the same request heard twice: a scheduler signals every process of a job, and
the launcher passes on to the ranks what it hears."""

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class StopRequested:
    """A flag that a stop signal sets, to be asked between verbs.

    >>> stop = StopRequested(grace_s=120.0)
    >>> stop.install()                      # main thread only
    >>> if stop.requested(): save_and_exit()

    After the first signal the process has ``grace_s`` seconds; then, or at a second signal (not within REPEAT_S of the
    first), it exits at once with 128 + the signal's number, without any clean-up but ``on_hard_exit``.
    """

    def __init__(self, grace_s: float, on_hard_exit: Callable[[], None] | None = None) -> None:
        self.grace_s = grace_s
        self._on_hard_exit = on_hard_exit
        self._requested = threading.Event()
        self._finished = threading.Event()
        self._signal = 0
        self._requested_s = 0.0
        self._read_fd = -1
        self._write_fd = -1
        self._previous_fd = -1
        self._previous: dict[signal.Signals, object] = {}

    def requested(self) -> bool:
        """Whether a stop signal has come; never blocks."""
        return self._requested.is_set()

    @property
    def signal_name(self) -> str:
        """``SIGTERM``, or whatever asked first; empty while nothing has."""
        return signal.Signals(self._signal).name if self._signal else ""

    def wait(self, timeout_s: float) -> bool:
        """Sleep up to ``timeout_s``, waking at a stop request; true when there is one."""
        return self._requested.wait(timeout_s)

    def install(self) -> None:
        """Take over the stop signals. Main thread only (ValueError elsewhere, from ``signal``)."""
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, _heard)
        threading.Thread(target=self._watch, name="stop-signals", daemon=True).start()

    def uninstall(self) -> None:
        """Give the signals back and end the grace period: the process has saved and is leaving in order."""
        self._finished.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned before
        if self._previous:
            signal.set_wakeup_fd(self._previous_fd)
            os.close(self._write_fd)  # the watcher reads the end of the pipe and closes its side
        self._previous = {}

    def _watch(self) -> None:
        while data := os.read(self._read_fd, 64):
            for number in data:
                if number in STOP_SIGNALS:
                    self._stop(number)
        os.close(self._read_fd)

    def _stop(self, number: int) -> None:
        if self._requested.is_set():
            if time.monotonic() - self._requested_s >= REPEAT_S:
                self._exit_now(number, "second stop signal")
            return
        self._signal = number
        self._requested_s = time.monotonic()
        self._requested.set()
        logger.warning(
            "%s: saving and stopping within %g s; once more stops at once", signal.Signals(number).name, self.grace_s
        )
        threading.Thread(target=self._enforce_grace, name="stop-grace", daemon=True).start()

    def _enforce_grace(self) -> None:
        if not self._finished.wait(self.grace_s):
            self._exit_now(self._signal, f"not saved within the grace period of {self.grace_s:g} s")

    def _exit_now(self, number: int, why: str) -> None:
        print(f"or1: {signal.Signals(number).name}: {why}; exiting without saving", file=sys.stderr, flush=True)
        try:
            if self._on_hard_exit is not None:
                self._on_hard_exit()
        finally:
            os._exit(128 + number)


def _heard(_number: int, _frame: FrameType | None) -> None:
    """Nothing to do: without a Python handler the signal would kill; the watcher thread does the work."""


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent dies, so that nothing outlives a killed run.

    Call it first thing in the child. ``parent_pid`` is the parent as it knows itself: a parent that died before the
    request was made is noticed by comparing, and the process then ends at once. The kernel watches the parent *thread*
    that started this process, which must therefore live as long as its process. Linux only; elsewhere OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise OSError("die_with_parent needs Linux's prctl, which this system lacks")
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(int(sig)), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG, {sig.name}): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)
