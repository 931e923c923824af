"""Start the trainer ranks on this machine and see them to their end: torchrun, with signals that mean "save and stop".

torchrun's agent runs in this process. Left to itself it answers a signal by sending it to each rank's whole process
group, and 30 s later SIGKILL. That group holds Ray's daemons and the engines that rank 0 started, which would die
before the save. So the signals are taken here and passed to the rank processes alone; the ranks save, stop their
own helpers and exit (``runtime.signals``). Ctrl-C and a closed terminal mean the same as SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Final

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PASSED_ON: Final = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
KILL_MARGIN_S: Final = 30.0
"""Beyond the grace period, in which a rank ends by itself, before what is left of it is killed."""

USER_ERROR: Final = 2
"""Exit code of a rank that has said what the user can mend."""

_MARK: Final = "OR1_LAUNCH"
_AGENT_LOGGER: Final = "torch.distributed.elastic.multiprocessing.api"


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    threads_per_rank: int | None,
    grace_s: float,
    task: str = "training",
    way_on: str = ". Run the same command again to continue from the last checkpoint.",
) -> int:
    """Run ``ranks`` processes of ``module`` with ``arguments`` until they end. Main thread only.

    Args:
        threads_per_rank: CPU threads of each rank; None: the cores divided by the ranks.
        grace_s: seconds that the ranks have to save and exit after a signal.
        task, way_on: words of the message that is printed when a rank fails.

    Returns the exit code for the shell: 0, a failed rank's own code (128 + n if signal n killed it), or 128 + n
    if signal n stopped this process. No process of the ranks is left when it returns.
    """
    threads = threads_per_rank or max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # or torchrun sets 1, and says so at length
    shepherd = _Shepherd(module, ranks, grace_s)
    os.environ[_MARK] = shepherd.mark  # the ranks and all that they start inherit it
    logging.getLogger(_AGENT_LOGGER).setLevel(logging.CRITICAL)  # how a rank ended is said here, in one line
    previous = {number: signal.signal(number, shepherd.heard) for number in PASSED_ON}
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    # An empty list of signals is not possible; those of PASSED_ON must not be among them.
    options += ["--signals-to-handle", "SIGQUIT", "--monitor-interval", "0.1"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", module, *arguments]))
    except ChildFailedError as error:
        shepherd.know(failure.pid for failure in error.failures.values())
        return _failed(error, shepherd, task, way_on)
    finally:
        shepherd.end()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 + shepherd.number if shepherd.number else 0


class _Shepherd:
    """Passes signals on to the ranks, and kills what does not end in time."""

    def __init__(self, module: str, ranks: int, grace_s: float) -> None:
        self.number = 0
        """The first signal heard; 0 while none was."""
        self.mark = uuid.uuid4().hex
        self._module = module
        self._rank_count = ranks
        self._grace_s = grace_s
        self._sessions: set[int] = set()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="shepherd", daemon=True).start()

    def know(self, ranks: Iterable[int]) -> None:
        """Pids of ranks that may have ended too soon to be seen."""
        self._sessions.update(ranks)

    def heard(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler."""
        first = not self.number
        self.number = self.number or number
        ranks = self._ranks()
        for rank in ranks:
            _send(rank.pid, PASSED_ON[signal.Signals(number)])
        if not ranks:  # nothing has begun, or all is over: there is nothing to save
            raise SystemExit(128 + number)
        if first:
            threading.Thread(target=self._enforce, name="shepherd-grace", daemon=True).start()

    def end(self) -> None:
        """The ranks are over: kill what they left in their sessions."""
        self._ended.set()
        self._kill_left_over()

    def _watch(self) -> None:
        # A rank that is killed leaves its session's other processes behind; the session's number is known by then.
        while len(self._sessions) < self._rank_count and not self._ended.wait(0.2):
            self.know(rank.pid for rank in self._ranks())

    def _enforce(self) -> None:
        if not self._ended.wait(self._grace_s + KILL_MARGIN_S):
            waited_s = self._grace_s + KILL_MARGIN_S
            print(f"or1: the ranks did not end within {waited_s:g} s; killing them", file=sys.stderr)
            self._kill_left_over()

    def _ranks(self) -> list[psutil.Process]:
        """torchrun's direct children that run the module; each leads a session."""
        found = []
        for child in psutil.Process().children():
            try:
                if self._module in child.cmdline():
                    found.append(child)
            except psutil.Error:  # it has just ended
                continue
        return found

    def _kill_left_over(self) -> None:
        """Processes in a rank's session, or with the launch's mark in their environment.

        Neither alone finds all: some programs start sessions of their own, some overwrite their environment (by
        setting a process title), and a rank may end before its session was seen.
        """
        self.know(rank.pid for rank in self._ranks())
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid():
                    continue
                if os.getsid(process.pid) in self._sessions or process.environ().get(_MARK) == self.mark:
                    _send(process.pid, signal.SIGKILL)
            except (psutil.Error, ProcessLookupError, PermissionError):  # it has just ended, or is not ours
                continue


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has just ended
        pass


def _failed(error: ChildFailedError, shepherd: _Shepherd, task: str, way_on: str) -> int:
    """Say which rank failed first and how; its own message or traceback stands above on stderr."""
    if shepherd.number:
        return 128 + shepherd.number
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    if code == USER_ERROR:  # said in a sentence, which the rest would bury
        return code
    how = f"was killed by {failure.signal_name()}" if code < 0 else f"exited with code {code}"
    when = time.strftime("%H:%M:%S", time.localtime(failure.timestamp))
    print(
        f"or1: {task} stopped: rank {rank} (pid {failure.pid}) {how} at {when}"
        + ("; its message is above" if code > 0 else "; an out-of-memory killer does that, or a person")
        + way_on,
        file=sys.stderr,
    )
    return 128 - code if code < 0 else code
