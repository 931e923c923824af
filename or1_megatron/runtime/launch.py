"""Launches this node's ranks under torchrun, and makes signals ask the ranks to save and stop.

torchrun's agent runs in this process. By default it forwards a signal to each rank's whole process group, and sends
SIGKILL 30 s later. Ray's daemons and the engines are in rank 0's group and would die before the ranks have saved. So
this module handles the signals and forwards them to the rank processes only. The ranks save, stop their own helpers
and exit (``runtime.signals``). Ctrl-C and a closed terminal have the effect of SIGTERM.

This process is a child subreaper: it adopts every process below it whose parent dies, so that it can kill them all.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

import psutil
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from or1_megatron.errors import PART_LOST, STOPPED, USER_ERROR
from or1_megatron.runtime.nodes import Nodes
from or1_megatron.runtime.signals import LAUNCH_MARK, signals_handled_by
from or1_megatron.runtime.watchdog import Watchdog

KILL_MARGIN_S: Final = 30.0
"""The launcher kills a rank that has not exited by itself this many seconds after the end of its grace period."""

_GONE_S: Final = 10.0
_PR_SET_CHILD_SUBREAPER: Final = 36  # of <sys/prctl.h>
_AGENT_LOGGERS: Final = ("multiprocessing.api", "agent.server.api")  # of torch.distributed.elastic


@dataclass(frozen=True, slots=True)
class Ended:
    """How the ranks of a launch ended."""

    code: int
    """The exit code for the shell. 128 + n: the launcher was stopped by signal n, or the rank that failed first was
    killed by signal n. Any other value: the exit code of the rank that failed first, or 0 if no rank failed."""
    stop_requested: bool
    """Whether a signal had asked the launcher to stop."""
    rank_code: int = 0
    """The exit code of the rank that failed first: -n if signal n killed the rank; 0: no rank failed."""
    how: str = ""
    """Which rank failed first, and how; empty if no rank failed."""


def run_ranks(module: str, arguments: Sequence[str], *, ranks: int, grace_s: float, task: str) -> int:
    """Run ``launch`` and return the shell's exit code. If the ranks failed at their ``task``, also print how."""
    ended = launch(module, arguments, ranks=ranks, grace_s=grace_s)
    # After a UserError more lines would bury the rank's own message.
    if ended.rank_code not in (0, USER_ERROR) and not ended.stop_requested:
        print(f"or1: {task} stopped: {ended.how}.", file=sys.stderr)
    return ended.code


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    grace_s: float,
    threads_per_rank: int | None = None,
    watchdog: Watchdog | None = None,
    nodes: Nodes | None = None,
) -> Ended:
    """Run ``ranks`` processes of ``module`` with ``arguments`` on this node until they end. Main thread only.

    Args:
        grace_s: seconds that the ranks have to save and exit after a signal.
        threads_per_rank: CPU threads of each rank; None: the cores divided by the ranks.
        watchdog: kills processes that stall, while the ranks run.
        nodes: the connection to other nodes' launchers, after ``Nodes.begin``; None: there is one node. The ranks of
            all nodes form one group. When a rank fails, all end, and each launcher returns how that first rank failed.

    No process of the ranks is left on this node when this function returns.
    """
    threads = threads_of_rank(threads_per_rank, ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # else torchrun sets 1 and prints a long notice
    supervisor = _Supervisor(module, grace_s, watchdog)
    os.environ[LAUNCH_MARK] = str(os.getpid())  # the ranks and all that they start inherit it
    for name in _AGENT_LOGGERS:  # _failed and node 0 say in one line how a rank ended
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    options = [*_rendezvous_options(nodes), "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    # torchrun must handle at least one signal, but none of LAUNCHER_STOP_SIGNALS.
    options += ["--signals-to-handle", "SIGQUIT", "--monitor-interval", "0.1"]
    watched = nullcontext() if nodes is None else nodes.watched(supervisor.terminate, supervisor.kill)
    with signals_handled_by(supervisor.on_signal):
        try:
            with watched:
                torchrun.run(torchrun.parse_args([*options, "-m", "or1_megatron.runtime.rank", module, *arguments]))
        except ChildFailedError as error:
            return _first_of_all(nodes, _failed(error, supervisor.number))
        except dist.DistError as error:
            if nodes is None:
                raise
            how = f"the {nodes.count} nodes did not meet at {nodes.address}:{nodes.port}: {error}".splitlines()[0]
            return _first_of_all(nodes, Ended(1, bool(supervisor.number), PART_LOST, how))
        finally:
            supervisor.end()
    return Ended(128 + supervisor.number if supervisor.number else 0, bool(supervisor.number))


def _rendezvous_options(nodes: Nodes | None) -> list[str]:
    if nodes is None:  # the host's own name need not resolve
        return ["--standalone", "--local-addr", "127.0.0.1"]
    options = ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
    options += ["--master-addr", nodes.address, "--master-port", str(nodes.port)]
    return [*options, "--rdzv-conf", f"timeout={nodes.timeout_s:.0f}"]


def _first_of_all(nodes: Nodes | None, ended: Ended) -> Ended:
    """Return how the first failed rank of all nodes ended. ``ended``: how this node's ranks ended."""
    if nodes is None:
        return ended
    if ended.stop_requested:  # the other nodes must not begin again
        nodes.first_failure(STOPPED, ended.code, ended.how)
        return ended
    rank_code, code, how = nodes.first_failure(ended.rank_code, ended.code, ended.how)
    return Ended(code, False, rank_code, how)


def threads_of_rank(wanted: int | None, ranks_here: int) -> int:
    """Return the number of CPU threads of a rank: ``wanted``; None: the machine's cores divided by ``ranks_here``.

    Args:
        ranks_here: the number of the run's ranks on this machine.
    """
    return wanted or max(1, (os.cpu_count() or 1) // ranks_here)


class _Supervisor:
    """Forwards signals to the ranks, and kills processes that do not end in time."""

    def __init__(self, module: str, grace_s: float, watchdog: Watchdog | None) -> None:
        self.number = 0
        """The first signal received; 0: none yet."""
        self._module, self._grace_s, self._watchdog = module, grace_s, watchdog
        self._ended = threading.Event()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
        self._others = psutil.Process().children(recursive=True)
        """Descendants of this process that existed before the ranks."""
        if watchdog is not None:
            watchdog.start()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Ask the ranks to save and end; the first signal starts the grace period."""
        first = not self.number
        self.number = self.number or number
        ranks = self._ranks()
        for rank in ranks:
            _send(rank.pid, signal.SIGUSR1)
        if not ranks:  # not started yet, or ended: there is nothing to save
            raise SystemExit(128 + number)
        if first:
            threading.Thread(target=self._enforce, name="launch-grace", daemon=True).start()

    def terminate(self) -> None:
        """Send SIGTERM to the ranks, because a rank of another node has failed.

        torchrun's agent does the same when a rank of its own node has failed. Ranks that are saving after a stop signal
        get no SIGTERM, because a second signal would stop them.
        """
        for rank in () if self.number else self._ranks():
            _send(rank.pid, signal.SIGTERM)

    def end(self) -> None:
        """Kill the processes that the ended ranks left behind, and wait until they are gone."""
        self._ended.set()
        if self._watchdog is not None:
            self._watchdog.stop()
        give_up = time.monotonic() + _GONE_S
        while (left := self.kill()) and time.monotonic() < give_up:
            for pid in left:
                with suppress(ChildProcessError):  # the process is not our child, or torchrun's agent has waited for it
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
        if self._watchdog is not None:
            self._watchdog.clear()

    def kill(self) -> list[int]:
        """Kill the processes of the run that still exist, and return their pids.

        If a Ray cluster is older than the run, only the watchdog knows the processes that it started for the run.
        """
        pids = {process.pid for process in psutil.Process().children(recursive=True)}
        if self._watchdog is not None:
            pids |= set(self._watchdog.left_over())
        pids -= {process.pid for process in self._others}
        for pid in pids:
            _send(pid, signal.SIGKILL)
        return list(pids)

    def _enforce(self) -> None:
        if not self._ended.wait(self._grace_s + KILL_MARGIN_S):
            waited_s = self._grace_s + KILL_MARGIN_S
            print(f"or1: the ranks did not end within {waited_s:g} s; killing them", file=sys.stderr)
            self.kill()

    def _ranks(self) -> list[psutil.Process]:
        """Return this process's direct children that run the module."""
        ranks = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has just ended
                if self._module in child.cmdline():
                    ranks.append(child)
        return ranks


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _failed(error: ChildFailedError, signal_number: int) -> Ended:
    """Return how the rank that failed first ended. If ranks failed at once, a killed rank counts as the first, since
    all other ranks lost their connection to it. ``signal_number``: the signal that the launcher got, or 0."""
    killed = [(rank, failure) for rank, failure in error.failures.items() if failure.exitcode == -signal.SIGKILL]
    rank, failure = killed[0] if killed else error.get_first_failure()
    code = failure.exitcode
    how = f"was killed by {failure.signal_name()}" if code < 0 else f"exited with code {code}"
    when = time.strftime("%H:%M:%S", time.localtime(failure.timestamp))
    line = f"rank {rank} (pid {failure.pid}) {how} at {when}"
    if code > 0:
        line += "; its message is above"
    elif code == -signal.SIGKILL:
        line += "; an out-of-memory killer does that, or a person"
    shell_code = 128 - code if code < 0 else code
    return Ended(128 + signal_number if signal_number else shell_code, bool(signal_number), code, line)
