"""Ends a rank that would wait for ever, and reports where every rank was.

Each rank runs a watchdog. They share a store that rank 0 hosts, with these keys: ``failure`` (the first failure),
``where/<rank>`` (where each rank is, once something has failed), ``beat/<rank>`` (heartbeats), ``told`` (rank 0 has
logged the report) and ``gone/<rank>`` (a rank no longer needs rank 0).

A watchdog has two threads. One asks the store; it hangs when rank 0's process stops answering (SIGSTOP, a silent
host). The other only looks at clocks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from typing import NoReturn

import torch.distributed as dist

from or1_verify.errors import Or1Error

log = logging.getLogger(__name__)

_FAILURE, _TOLD = "failure", "told"
_POLL_S = 0.5
_GATHER_S = 3.0
"""How long the living ranks may take to report where they are."""
_GRACE_S = 5.0
"""How long rank 0 may take to notice by itself that another rank has failed, and to close what it has started."""
_SILENT_S = 60.0
"""A rank without a heartbeat for this long (or the deadline, if that is shorter) between verbs is dead."""
_LAST_RESORT_S = 15.0
"""How long past the deadline, or after it decided to end, a rank waits for the others before it ends alone."""
_FRAMES = 10
"""Number of innermost frames shown of a rank's stack."""


class Watchdog:
    """One rank's watchdog.

    Args:
        store: a connection of its own, on which a blocked call blocks nothing else.
        deadline_s: longest time for one verb.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, deadline_s: float) -> None:
        self._store, self._rank, self._world, self._deadline_s = store, rank, world, deadline_s
        self._main = threading.get_ident()
        self._running: tuple[str, float] | None = None
        self._asking_since: float | None = None
        self._raised: str | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._looked_s = time.monotonic()
        self._over = threading.Event()
        """Set when the verbs are over, or rank 0's main thread is about to end: there is nothing to watch."""
        self._telling = threading.Lock()
        self._told = False
        self._ending_since: float | None = None
        self._beat()
        for task in (self._watch, self._watch_clocks):
            threading.Thread(target=task, name=f"lockstep{task.__name__}", daemon=True).start()

    # -- called by the main thread -------------------------------------------------------------------------------

    def verb_began(self, verb: str) -> None:
        self._running = (verb, time.monotonic())

    def verb_ended(self) -> None:
        self._running = None

    def failed(self, verb: str, error: Exception) -> tuple[str | None, str]:
        """Report an error of this rank's verb, unless another rank has failed before. Returns only on rank 0.

        Returns (the failure in a line, or None if it is this error; where all ranks are).
        """
        frames = "".join(traceback.format_exception(error))
        self._raised = f"raised {type(error).__name__}: {error}"
        own = not _lost_a_peer(error)
        if not own:  # a symptom: give the failed rank time to report, if it lives
            time.sleep(2 * _POLL_S)
        how = "failed" if own else "lost a peer"
        report = f"rank {self._rank} {how} in '{verb}':\n{frames}"
        first = self._report(report) or report
        if self._rank > 0:
            self._end(first)
        self._over.set()
        if own and first == report:
            positions = self._positions()
            self._set(_TOLD, "1")
            return None, positions
        return first.splitlines()[0].rstrip(":"), self._tell_all(first)

    def close(self) -> None:
        """End the watch. Rank 0 waits a moment for the ranks that still need its store."""
        self._over.set()
        if self._rank > 0:
            self._set(f"gone/{self._rank}", "1")
            return
        failed = self._get(_FAILURE) is not None
        needed = [rank for rank in range(1, self._world) if not failed or self._get(f"where/{rank}") is not None]
        self._wait_for([f"gone/{rank}" for rank in needed], _GRACE_S)

    # -- the threads ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                self._asking_since = time.monotonic()
                self._beat()
                trouble = self._trouble()
            except dist.DistError:
                trouble = None if self._over.wait(_POLL_S) else "rank 0, which hosts the store, is gone"
            finally:
                self._asking_since = None
            if trouble is not None and not self._over.is_set():
                self._end(trouble)

    def _trouble(self) -> str | None:
        """Return the run's first failure, if there is one by now."""
        if self._store.check([_FAILURE]):
            return self._store.get(_FAILURE).decode()
        running = self._running
        if running is not None and time.monotonic() - running[1] > self._deadline_s:
            return self._report(_late(running[0], self._deadline_s))
        if self._rank == 0 and running is None and (silent := self._silent()):
            since_s = min(_SILENT_S, self._deadline_s)
            named = _ranks(silent)
            return self._report(f"{named} gave no sign of life for {since_s:g} s between two verbs: dead, or stopped")
        return None

    def _beat(self) -> None:
        self._store.set(f"beat/{self._rank}", str(time.monotonic()))

    def _silent(self) -> list[int]:
        """Return the ranks whose heartbeat has not changed for too long; on rank 0."""
        keys = [f"beat/{rank}" for rank in range(1, self._world)]
        if not keys or not self._store.check(keys):  # some have not started
            return []
        now = time.monotonic()
        suspended = now - self._looked_s > 10 * _POLL_S  # this process was; the others may have been, too
        self._looked_s = now
        for rank, beat in enumerate(self._store.multi_get(keys), start=1):
            if suspended or self._beats.get(rank, (b"", now))[0] != beat:
                self._beats[rank] = (beat, now)
        return [rank for rank, (_, since) in self._beats.items() if now - since > min(_SILENT_S, self._deadline_s)]

    def _watch_clocks(self) -> None:
        """Watch for what the other thread cannot see while the store does not answer."""
        while not self._over.wait(_POLL_S):
            now, running, asking, ending = time.monotonic(), self._running, self._asking_since, self._ending_since
            late_s = 0.0 if running is None else now - running[1] - self._deadline_s
            mute_s = 0.0 if asking is None else now - asking
            if (late_s > 0 and mute_s > 2 * _POLL_S) or late_s > _LAST_RESORT_S:
                verb = running[0] if running is not None else ""
                self._exit(_late(verb, self._deadline_s) + self._mute(mute_s))
            elif mute_s > max(self._deadline_s, _LAST_RESORT_S):
                self._exit(self._mute(mute_s).removeprefix("; "))
            elif ending is not None and now - ending > _LAST_RESORT_S:
                os._exit(1)

    @staticmethod
    def _mute(mute_s: float) -> str:
        if mute_s < _POLL_S:
            return ""
        return f"; rank 0, which hosts the store, has not answered for {mute_s:.0f} s: stopped, or its host is gone"

    # -- the end -------------------------------------------------------------------------------------------------

    def _report(self, report: str) -> str | None:
        """Record a failure if it is the first; return the first one, or None if the store is gone."""
        try:
            first: bytes = self._store.compare_set(_FAILURE, "", report)
            return first.decode()
        except dist.DistError:
            return None

    def _end(self, failure: str) -> None:
        """End this rank. Rank 0 logs why and where all ranks are; if it does not, this rank does.

        Returns only on rank 0, if its main thread ends by itself.
        """
        self._ending_since = time.monotonic()
        if self._rank == 0:
            self._tell_all(failure)
            if self._over.wait(_GRACE_S):
                self._ending_since = None
                return
            os._exit(1)
        told = self._set(f"where/{self._rank}", self._where()) and self._wait_for([_TOLD], 2 * _GATHER_S)
        self._set(f"gone/{self._rank}", "1")
        if told:
            log.info("ending this rank: %s", failure)
        else:
            self._tell_all(failure)
        os._exit(1)

    def _exit(self, failure: str) -> NoReturn:
        """End this rank without the store."""
        log.error("ending this rank: %s\nrank %d, %s", failure, self._rank, self._where())
        os._exit(1)

    def _tell_all(self, failure: str) -> str:
        """Log what failed and where all ranks are, once; return where they are."""
        with self._telling:
            positions = self._positions()
            if not self._told:
                log.error("the ranks end: %s\n%s", failure, positions)
                self._told = True
            if self._rank == 0:
                self._set(_TOLD, "1")
            return positions

    def _positions(self) -> str:
        """Return where each rank is, with ranks at the same place together; waits a moment until all have reported."""
        if not self._set(f"where/{self._rank}", self._where()):
            return f"rank {self._rank}, {self._where()}"  # rank 0 is gone, and with it the store
        keys = {rank: f"where/{rank}" for rank in range(self._world)}
        self._wait_for(list(keys.values()), _GATHER_S)
        places: dict[str, list[int]] = {}
        silent = []
        for rank, key in keys.items():
            place = self._where() if rank == self._rank else self._get(key)
            if place is None:
                silent.append(rank)
            else:
                places.setdefault(place, []).append(rank)
        said = [f"{_ranks(ranks)}, {place}" for place, ranks in places.items()]
        if silent:
            said.append(f"not heard from: {_ranks(silent)}")
        return "\n".join(said)

    def _where(self) -> str:
        """Return where this rank's main thread is."""
        running = self._running
        verb = "waiting for a verb" if running is None else f"in '{running[0]}'"
        if self._raised is not None:
            return f"{verb}, {self._raised}"
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame else "(unknown)"
        return f"{verb}, at\n{stack.rstrip()}"

    # -- the store, which may be gone ----------------------------------------------------------------------------

    def _set(self, key: str, value: str) -> bool:
        try:
            self._store.set(key, value)
        except dist.DistError:
            return False
        return True

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except dist.DistError:
            return None

    def _wait_for(self, keys: list[str], timeout_s: float) -> bool:
        """Return whether all of the keys were set in time."""
        until = time.monotonic() + timeout_s
        try:
            while not self._store.check(keys):
                if time.monotonic() > until:
                    return False
                time.sleep(_POLL_S / 10)
        except dist.DistError:
            return False
        return True


def _late(verb: str, deadline_s: float) -> str:
    return f"'{verb}' was not finished after {deadline_s:g} s (cluster.verb_timeout_s)"


def _lost_a_peer(error: Exception) -> bool:
    """Return whether a collective broke or timed out because of another rank: gloo and NCCL have no type for that."""
    text = str(error)
    if isinstance(error, Or1Error):
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("onnection" in text or "imed out" in text)
    )


def _ranks(ranks: list[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 1, 4-6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
