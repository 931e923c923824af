"""Watchdog: kills processes of a run that hang, so that they count as dead and the run can recover.

The launcher of each node runs a watchdog on a thread. Every second it looks at each process below the launcher and at
the heartbeats (``heartbeat``). A process that is stopped (state T) for ``heartbeat_s`` is killed. A process whose
heartbeat stands still for ``heartbeat_s`` is judged by its state, and by the CPU time of its busiest thread during the
standstill:

    it ran, or waits for a core          it is busy or starved; killed only after _BUSY_FACTOR * heartbeat_s of CPU
                                         time
    waiting for a disk or device (D)     killed after _DISK_FACTOR * heartbeat_s, because storage may come back
    asleep                               killed, unless its work is known to take long
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from or1_megatron.runtime.faults import Fault, FaultRecord
from or1_megatron.runtime.heartbeat import Beat, beats_folder, read_beats
from or1_megatron.runtime.processes import (
    STATES,
    Process,
    all_processes,
    command_line,
    descendants,
    runnable,
    thread_times_ns,
)

_LOOK_S: Final = 1.0
_LATE_S: Final = 4.0
"""If the last look was more seconds ago than this, the whole machine may have paused: all waits begin anew."""
_BUSY_FACTOR: Final = 6.0
_DISK_FACTOR: Final = 20.0
_ON_CORES: Final = 0.2
"""A thread counts as busy if it ran on a core for at least this share of its heartbeat's standstill."""
_OWN_CHILDREN: Final = "or1_verify.pool.pool_process"
"""Module of verifier processes. Their children are not watched: verifiers have deadlines for untrusted programs."""


@dataclass(slots=True)
class _Silence:
    """A heartbeat counter of one process, which has not advanced since ``since_s`` (monotonic seconds)."""

    sign: tuple[int, bool]
    """The counter's value, and whether the process does something long."""
    since_s: float
    times_ns: Mapping[int, int]
    """CPU times of the process's threads at ``since_s``, by thread id."""
    excused: bool = False


class Watchdog:
    """Watches the descendants of the process ``root``, and all processes of the run with a heartbeat on this node."""

    def __init__(
        self, root: int, run: str, heartbeat_s: float, faults: FaultRecord, say: Callable[[str], None] | None = None
    ) -> None:
        """
        Args:
            root: the launcher's pid. The launcher adopts processes whose parent has died.
            run: the run's name, for the folder of heartbeats (``beats_folder``).
            faults: records each stall.
            say: prints a line for people; by default to standard error.
        """
        self._root, self._heartbeat_s, self._faults = root, heartbeat_s, faults
        self._folder = beats_folder(run)
        self._say = say or (lambda line: print(f"or1: {line}", file=sys.stderr, flush=True))
        self._silences: dict[tuple[int, int, str], _Silence] = {}
        self._stopped_since: dict[tuple[int, int], float] = {}
        self._killed: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int]] = set()
        """(pid, start) of the run's processes at the last look. They are remembered because a process whose parent has
        died has no ancestor that belongs to the run, if the Ray cluster is older than the run."""
        self._looked_s = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Call ``look`` every second on a thread, until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def left_over(self) -> list[int]:
        """Return the pids of the run's processes that still exist."""
        there = all_processes()
        return [process.pid for process in self._processes(there, self._living_beats(there))]

    def clear(self) -> None:
        """Delete the run's folder of heartbeats. Call this when its processes have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def look(self) -> None:
        """Check all processes once, and kill the processes that have stalled."""
        now = time.monotonic()
        if now - self._looked_s > _LATE_S:
            self._silences.clear()
            self._stopped_since.clear()
        self._looked_s = now
        there = all_processes()
        beats = self._living_beats(there)
        ours = self._processes(there, beats)
        for process in ours:
            if (process.pid, process.started) not in self._killed:
                why = self._stopped(process, now) or self._silent(process, beats.get(process.pid), now)
                if why:
                    self._end(process, why, beats)
        for gone in self._stopped_since.keys() - {(process.pid, process.started) for process in ours}:
            del self._stopped_since[gone]

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def _living_beats(self, there: Mapping[int, Process]) -> dict[int, Beat]:
        """Return the heartbeats of living processes by pid, and delete the files of ended processes."""
        living = {}
        for beat in read_beats(self._folder):
            process = there.get(beat.pid)
            if process is not None and process.started == beat.started and process.state != "Z":
                living[beat.pid] = beat
            else:
                Path(self._folder, str(beat.pid)).unlink(missing_ok=True)
        return living

    def _processes(self, there: Mapping[int, Process], beats: Mapping[int, Beat]) -> list[Process]:
        """Return the run's processes, without the processes below verifiers."""
        roots = set(beats) | {pid for pid, started in self._seen if pid in there and there[pid].started == started}
        below = {process.pid: process for process in descendants({self._root, *roots}, there)}
        below |= {pid: there[pid] for pid in roots}
        verifiers = {pid for pid in below if _OWN_CHILDREN in command_line(pid)}
        for inner in descendants(verifiers, below):
            del below[inner.pid]
        ours = [process for process in below.values() if process.state != "Z" and process.pid != os.getpid()]
        self._seen = {(process.pid, process.started) for process in ours}
        return ours

    def _stopped(self, process: Process, now: float) -> str:
        """Return why the process must be killed for being stopped too long; empty: it need not be killed."""
        key = (process.pid, process.started)
        if process.state != "T":
            self._stopped_since.pop(key, None)
            return ""
        since_s = now - self._stopped_since.setdefault(key, now)
        return f"for {since_s:.0f} s: stopped (state T)" if since_s >= self._heartbeat_s else ""

    def _silent(self, process: Process, beat: Beat | None, now: float) -> str:
        """Return the reason to kill the process if its heartbeat has not changed for too long; "" without a reason."""
        if beat is None:
            return ""
        signs = {"alive": beat.alive}
        if beat.worked >= 0 and not beat.long:
            signs["worked"] = beat.worked
        if process.state == "t":  # a debugger holds the process; its time begins when it is released
            signs = {}
        for name in {"alive", "worked"} - signs.keys():
            self._silences.pop((process.pid, process.started, name), None)
        return next((why for name in signs if (why := self._overdue(process, beat, name, signs[name], now))), "")

    def _overdue(self, process: Process, beat: Beat, name: str, count: int, now: float) -> str:
        key = (process.pid, process.started, name)
        silence = self._silences.get(key)
        if silence is None or silence.sign != (count, beat.long):
            self._silences[key] = _Silence((count, beat.long), now, thread_times_ns(process.pid))
            return ""
        lasted_s = now - silence.since_s
        if lasted_s < self._heartbeat_s:
            return ""
        ran_ns = [time_ns - silence.times_ns.get(id_, 0) for id_, time_ns in thread_times_ns(process.pid).items()]
        ran_s = max(ran_ns, default=0) / 1e9
        where = f"{STATES.get(process.state, 'in state')} (state {process.state})"
        if ran_s >= _BUSY_FACTOR * self._heartbeat_s and not beat.long:
            return f"for {lasted_s:.0f} s, in which a thread of it ran for {ran_s:.0f} s: {where}"
        if ran_s >= _ON_CORES * lasted_s:
            excuse = f"it ran for {ran_s:.1f} s of it, {where}"
        elif runnable(process.pid):
            excuse = "it waits for a core (starved)"
        elif beat.long:
            excuse = f"it is {beat.doing}"
        elif process.state == "D" and lasted_s < _DISK_FACTOR * self._heartbeat_s:
            excuse = f"it is {where}"
        else:
            return f"for {lasted_s:.0f} s, in which it ran for {ran_s:.1f} s: {where}"
        if not silence.excused:
            silence.excused = True
            silent = f"has given no sign of life for {lasted_s:.0f} s and is left alone"
            self._say(f"{beat.who} (pid {beat.pid}) {silent}: {excuse}")
        return ""

    def _end(self, process: Process, why: str, beats: Mapping[int, Beat]) -> None:
        """Kill the stalled process. Print and record what it did last, and what rank 0 does meanwhile."""
        beat = beats.get(process.pid)
        who = beat.who if beat is not None else _called(process)
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            return
        self._killed.add((process.pid, process.started))
        silent = f"has given no sign of life {why}"
        named = f"{who} (pid {process.pid})"
        first = next((other for other in beats.values() if other.who == "rank 0" != who), None)
        line = f"{named} {silent}" if first is None else f"rank 0 waits in '{first.doing}' for {named}, which {silent}"
        line += f"; the last that it said: '{beat.doing}'; it is killed" if beat is not None else "; it is killed"
        self._say(line)
        self._faults.write(Fault("stalled", who, line))


def _called(process: Process) -> str:
    """Return what messages call a process that has no heartbeat."""
    words = command_line(process.pid)
    if "or1_megatron.trainer.run" in words:
        return "a trainer rank that starts"
    if _OWN_CHILDREN in words:
        return "a verifier"
    return f"'{Path(words[0].split(' ')[0]).name or process.name}'"
