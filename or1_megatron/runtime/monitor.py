"""Ends what has stalled: a process that lives and does nothing is killed, and then counts as dead like any other.

One monitor per node looks every second: at each process below the run's launcher, stopped or not, and at the heartbeats
(``heartbeat``). Under ``or1 train`` it is a thread of the launcher. Under plain torchrun the first rank of each node
starts it as a process:

    python -m or1_megatron.runtime.monitor AGENT_PID RUN HEARTBEAT_S RUN_FOLDER

A process without a sign of life for ``heartbeat_s`` is judged by its state and by what its busiest thread got of the
cores in that time:

    stopped (T)                          it is killed, whatever it was doing
    it ran, or waited for a core         it is starved or busy, and lives; killed only after _BUSY_FACTOR * heartbeat_s
                                         of CPU time
    waiting for a disk or device (D)     killed after _DISK_FACTOR * heartbeat_s: storage may come back
    asleep                               killed, unless what it does is known to take long
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from or1_megatron.runtime.faults import Fault, FaultRecord
from or1_megatron.runtime.heartbeat import Beat, beats_folder, read_beats
from or1_megatron.runtime.processes import (
    STATES,
    CoreTime,
    Process,
    ThreadTimes,
    all_processes,
    command_line,
    core_time_between,
    descendants,
    runnable,
    stacks,
    thread_times,
    waits_in,
)

_LOOK_S: Final = 1.0
_LATE_S: Final = 4.0
"""When the monitor itself was away for longer than this, all clocks begin anew: the others may have been away, too."""
_BUSY_FACTOR: Final = 6.0
_DISK_FACTOR: Final = 20.0
_ON_CORES: Final = 0.2
"""A thread that ran or waited for a core for this share of the time has something to do."""
_OWN_CHILDREN: Final = "or1_verify.pool.pool_process"
"""What runs below a verifier has deadlines of its own, and untrusted programs may stop themselves."""

Counters = tuple[int, int]


@dataclass(slots=True)
class _Silence:
    """Since when a process has shown no sign of life, by the monitor's clock."""

    counters: Counters
    since_s: float
    times: ThreadTimes
    excused: bool = False


class Monitor:
    """Looks after the processes below ``root`` and those with a heartbeat on this node."""

    def __init__(
        self, root: int, run: str, heartbeat_s: float, faults: FaultRecord, say: Callable[[str], None] | None = None
    ) -> None:
        """
        Args:
            root: the launcher's pid.
            run: names the folder of heartbeats (``beats_folder``).
            faults: where each stall is recorded; stacks go to a file beside the logs.
            say: prints a line for people; to standard error unless given.
        """
        self._root, self._heartbeat_s, self._faults = root, heartbeat_s, faults
        self._beats = beats_folder(run)
        self._say = say or (lambda line: print(f"or1: {line}", file=sys.stderr, flush=True))
        self._silences: dict[tuple[int, int, str], _Silence] = {}
        self._stopped_since: dict[tuple[int, int], float] = {}
        self._seen: dict[int, int] = {}
        self._killed: set[tuple[int, int]] = set()
        self._looked_s = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look every second, on a thread, until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def left_over(self) -> list[int]:
        """Return the processes of the run that are still there, those whose parent has died included."""
        there = all_processes()
        return [
            process.pid for process in self._processes(there, {beat.pid: beat for beat in self._living_beats(there)})
        ]

    def clear(self) -> None:
        """Remove the heartbeats of processes that have ended."""
        shutil.rmtree(self._beats, ignore_errors=True)

    def look(self) -> None:
        """Look once, and kill what has stalled."""
        now = time.monotonic()
        if now - self._looked_s > _LATE_S:
            self._silences.clear()
            self._stopped_since.clear()
        self._looked_s = now
        there = all_processes()
        beats = {beat.pid: beat for beat in self._living_beats(there)}
        ours = self._processes(there, beats)
        self._seen = {process.pid: process.started for process in ours}
        for process in ours:
            key = (process.pid, process.started)
            if key in self._killed:
                continue
            why = self._stopped(process, now) or self._silent(process, beats.get(process.pid), now)
            if why:
                self._end(process, why, beats)
        for gone in self._stopped_since.keys() - {(process.pid, process.started) for process in ours}:
            del self._stopped_since[gone]

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def _living_beats(self, there: dict[int, Process]) -> list[Beat]:
        """Return the heartbeats of living processes, and delete the files of the others."""
        living = []
        for beat in read_beats(self._beats):
            if beat.pid in there and _is(there[beat.pid], beat.started):
                living.append(beat)
            else:
                Path(self._beats, str(beat.pid)).unlink(missing_ok=True)
        return living

    def _processes(self, there: dict[int, Process], beats: dict[int, Beat]) -> list[Process]:
        """Return the run's processes, those whose parent has died included, without what verifiers run."""
        seen = [pid for pid, started in self._seen.items() if pid in there and _is(there[pid], started)]
        roots = {self._root, *seen, *beats}
        found = {process.pid: process for process in descendants(roots, there)}
        found |= {pid: there[pid] for pid in roots - {self._root}}
        workers = {pid for pid in found if _OWN_CHILDREN in command_line(pid)}
        for inner in descendants(workers, found):
            del found[inner.pid]
        return [process for process in found.values() if process.state != "Z" and process.pid != os.getpid()]

    def _stopped(self, process: Process, now: float) -> str:
        """Return why a stopped process is ended now; empty if it is not."""
        key = (process.pid, process.started)
        if process.state != "T":
            self._stopped_since.pop(key, None)
            return ""
        since_s = now - self._stopped_since.setdefault(key, now)
        return f"for {since_s:.0f} s: stopped (state T)" if since_s >= self._heartbeat_s else ""

    def _silent(self, process: Process, beat: Beat | None, now: float) -> str:
        """Return why a process that runs but gives no sign of life is ended now; empty if it is not."""
        if beat is None:
            return ""
        if process.state == "t":  # a debugger holds it; its time begins when it goes on
            for name in ("alive", "worked"):
                self._silences.pop((process.pid, process.started, name), None)
            return ""
        counters = {"alive": beat.alive}
        if beat.worked >= 0 and not beat.long:
            counters["worked"] = beat.worked
        why = ""
        for name, count in counters.items():
            why = why or self._overdue(process, beat, name, (count, int(beat.long)), now)
        if "worked" not in counters:
            self._silences.pop((process.pid, process.started, "worked"), None)
        return why

    def _overdue(self, process: Process, beat: Beat, name: str, counters: Counters, now: float) -> str:
        key = (process.pid, process.started, name)
        silence = self._silences.get(key)
        if silence is None or silence.counters != counters:
            self._silences[key] = _Silence(counters, now, thread_times(process.pid))
            return ""
        lasted_s = now - silence.since_s
        if lasted_s < self._heartbeat_s:
            return ""
        if process.state == "T":
            return f"for {lasted_s:.0f} s: stopped (state T)"
        got = core_time_between(silence.times, thread_times(process.pid))
        starved = runnable(process.pid) and got.ran_s + got.waited_s < _ON_CORES * lasted_s
        busy = starved or got.ran_s + got.waited_s >= _ON_CORES * lasted_s
        where = f"{STATES.get(process.state, 'in state')} (state {process.state})"
        if got.ran_s >= _BUSY_FACTOR * self._heartbeat_s and not beat.long:
            return f"for {lasted_s:.0f} s, in which a thread of it ran for {got.ran_s:.0f} s: {where}"
        if busy or beat.long or (process.state == "D" and lasted_s < _DISK_FACTOR * self._heartbeat_s):
            if not silence.excused:
                silence.excused = True
                excuse = _excuse(got, where, starved)
                reason = excuse if busy else f"it is {beat.doing}" if beat.long else f"it is {where}"
                silent = f"has given no sign of life for {lasted_s:.0f} s and is left alone"
                self._say(f"{beat.who} (pid {beat.pid}) {silent}: {reason}")
            return ""
        asleep = f" in {place}" if (place := waits_in(process.pid)) else ""
        return f"for {lasted_s:.0f} s, in which it ran for {got.ran_s:.1f} s: {where}{asleep}"

    def _end(self, process: Process, why: str, beats: dict[int, Beat]) -> None:
        """Take the stalled process's stacks, say who waits for whom, and kill it."""
        beat = beats.get(process.pid)
        who = beat.who if beat is not None else _called(process)
        stack = stacks(process.pid)
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
        self._faults.write_stack(line, stack)


def _is(process: Process, started: int) -> bool:
    return process.started == started and process.state != "Z"


def _called(process: Process) -> str:
    """Return what people call a process that has no heartbeat."""
    words = command_line(process.pid)
    if "or1_megatron.trainer.run" in words:
        return "a trainer rank that starts"
    if _OWN_CHILDREN in words:
        return "a verifier"
    return f"'{Path(words[0].split(' ')[0]).name or process.name}'" if words else f"'{process.name}'"


def _excuse(got: CoreTime, where: str, starved: bool) -> str:
    if starved:
        return "it waits for a core (starved)"
    if got.waited_s > got.ran_s:
        return f"others had the cores for {got.waited_s:.1f} s of it (starved)"
    return f"it ran for {got.ran_s:.1f} s of it, {where}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="or1_megatron.runtime.monitor", description=__doc__)
    parser.add_argument("root", type=int)
    parser.add_argument("run")
    parser.add_argument("heartbeat_s", type=float)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the ranks, which save; this process ends with its parent
    monitor = Monitor(arguments.root, arguments.run, arguments.heartbeat_s, FaultRecord(arguments.folder))
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
        monitor.look()


if __name__ == "__main__":
    main()
