"""Stop signals (pre-emption): SIGTERM and SIGUSR1 ask a rank to save and exit within a grace period.

Our launcher asks its ranks with SIGUSR1. At SIGTERM these ranks end 2 s later, because torchrun's agent sends it when
another rank has failed. But a scheduler may send SIGTERM to all processes of a job: if SIGUSR1 follows, the ranks save.

A Python signal handler runs only when the main thread returns from C code. In a collective that would be too late. But
Python's C-level handler writes the signal's number to a pipe at once, so a thread that reads the pipe sees it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from or1_megatron.errors import PART_LOST
from or1_megatron.runtime.heartbeat import main_thread_stack

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Each of these signals asks a launcher to let the ranks save and end. The launcher sends SIGUSR1 to the ranks."""
REPEAT_S = 2.0
"""Further stop signals are ignored for this many seconds after the first. A rank may get the same stop twice: a
scheduler signals every process of a job, and the launcher forwards its own signal to the ranks."""

LAUNCH_MARK = "OR1_LAUNCH"
"""An environment variable of all processes that ``launch`` starts; its value is the launcher's pid."""

CPP_LOG_LEVEL, QUIET = "TORCH_CPP_LOG_LEVEL", "FATAL"
"""This environment variable keeps warnings and stack frames of torch's C++ code off the launcher's console. The ranks
delete it from their environment, because they write such lines to their log."""

_LAST_WORDS_S = 2.0


def is_launched() -> bool:
    """Return whether ``launch`` started this process as a rank. Such a rank's node has a watchdog.

    The variable ``LAUNCH_MARK`` must name the parent's pid, because processes that a rank starts inherit the variable
    and may begin a run of their own.
    """
    return os.environ.get(LAUNCH_MARK) == str(os.getppid())


@contextmanager
def signals_handled_by(
    handler: Callable[[int, FrameType | None], Any], numbers: Sequence[signal.Signals] = LAUNCHER_STOP_SIGNALS
) -> Iterator[None]:
    """Let the signals of ``numbers`` call ``handler`` within the block. Main thread only.

    An ignored SIGHUP stays ignored (nohup). An ignored SIGINT is handled, because shells ignore it in background jobs.
    """
    heard = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class StopRequested:
    """A flag that a stop signal sets. The loop reads it between verbs.

    >>> stop = StopRequested(grace_s=120.0)
    >>> with stop.handling_signals():       # main thread only
    ...     if stop.requested(): save_and_exit()

    The process exits without clean-up, with 128 + the signal's number, ``grace_s`` seconds after the first signal, or
    at a second signal that comes REPEAT_S or more after the first.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._requested = threading.Event()
        self._finished = threading.Event()
        self._requested_s = 0.0

    def requested(self) -> bool:
        """Return whether a stop signal has come. Never blocks."""
        return self._requested.is_set()

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle the stop signals within the block. Use it once, in the main thread; elsewhere it raises ValueError.

        The end of the block ends the grace period, because the process has saved and exits normally.
        """
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read_fd,), name="stop-signals", daemon=True).start()
        try:
            with signals_handled_by(_heard, STOP_SIGNALS):
                yield
        finally:
            self._finished.set()
            signal.set_wakeup_fd(previous_fd)
            os.close(write_fd)  # the watcher then reads the end of the pipe and closes its side

    def _watch(self, read_fd: int) -> None:
        while data := os.read(read_fd, 64):
            for number in data:
                if number in STOP_SIGNALS:
                    self._stop(number)
        os.close(read_fd)

    def _stop(self, number: int) -> None:
        if self._requested.is_set():
            if time.monotonic() - self._requested_s >= REPEAT_S:
                self._exit_now(number, "second stop signal")
            return
        if number == signal.SIGTERM and is_launched():
            logger.info("SIGTERM: has another rank failed? The main thread is at\n%s", main_thread_stack())
            threading.Thread(target=self._end_unless_saving, name="stop-agent", daemon=True).start()
            return
        self._requested_s = time.monotonic()
        self._requested.set()
        name = signal.Signals(number).name
        logger.warning("%s: saving and stopping within %g s; a second signal stops at once", name, self.grace_s)
        threading.Thread(target=self._enforce_grace, args=(number,), name="stop-grace", daemon=True).start()

    def _end_unless_saving(self) -> None:
        """End this rank ``_LAST_WORDS_S`` after SIGTERM (another rank has failed), unless it saves or has saved."""
        time.sleep(_LAST_WORDS_S)
        if not (self._finished.is_set() or self._requested.is_set()):
            os._exit(PART_LOST)

    def _enforce_grace(self, number: int) -> None:
        if not self._finished.wait(self.grace_s):
            self._exit_now(number, f"not saved within the grace period of {self.grace_s:g} s")

    def _exit_now(self, number: int, why: str) -> None:
        print(f"or1: {signal.Signals(number).name}: {why}; exiting without saving", file=sys.stderr, flush=True)
        os._exit(128 + number)


def _heard(_number: int, _frame: FrameType | None) -> None:
    """Do nothing, because the watcher thread acts. Without a Python handler the signal would kill the process."""
