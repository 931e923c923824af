"""The watchdog tells processes that have stalled from those that are starved, busy or asleep with good reason.

Real Python processes with real heartbeats, stopped, starved and hung as in life. Not proven here: that a run survives
what the watchdog kills (tests/train/test_keeps_running.py).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_until

from or1_megatron.runtime import watchdog as module
from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime.heartbeat import Heartbeat, beats_folder, read_beats
from or1_megatron.runtime.watchdog import Watchdog

CHILD = """
import ctypes, os, sys, time
from or1_megatron.runtime.heartbeat import Heartbeat, beats_folder
run, what = sys.argv[1:]
if what == "starved":
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # one per mille of a core beside a busy loop
heart = Heartbeat(beats_folder(run), what, doing="at work", long=False)
print("up", flush=True)
end = time.monotonic() + 600
hold_interpreter = ctypes.PyDLL(None)  # its calls keep the interpreter's lock
if what == "hung":
    hold_interpreter.sleep(600)
if what == "loading":
    with heart.busy_with("loading a large model"):
        hold_interpreter.sleep(600)
if what in ("spins", "starved"):
    sum(range(1 << 60))
if what == "driver":  # the watched thread hangs outside the interpreter, and others go on
    heart.worked()
    time.sleep(600)
while time.monotonic() < end:
    heart.worked()
    time.sleep(0.1)
"""
BUSY = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"

HEARTBEAT_S = 3.0
KINDS = ("healthy", "stopped", "starved", "hung", "loading", "spins", "driver")


class Watched:
    """Children of this process under a watchdog, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.run = str(folder)
        self.faults = FaultRecord(folder)
        self.said: list[str] = []
        self.watchdog = Watchdog(os.getpid(), self.run, HEARTBEAT_S, self.faults, self.said.append)
        self.children: dict[str, subprocess.Popen[str]] = {}

    def start(self, what: str, core: int | None = None) -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", CHILD, self.run, what], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        if core is not None:
            os.sched_setaffinity(child.pid, {core})
        self.children[what] = child
        return child

    def look_until(self, ended: set[str]) -> None:
        def all_ended() -> bool:
            self.watchdog.look()
            return all(self.children[name].poll() is not None for name in ended)

        wait_until(all_ended, f"{ended} to end", every_s=0.3)

    def look_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.watchdog.look()
            time.sleep(0.3)

    def line(self, what: str) -> str:
        return [line for line in self.said if line.startswith(what)][-1]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(module, "_BUSY_FACTOR", 1.0)
    monkeypatch.setattr(module, "_LATE_S", 0.8 * HEARTBEAT_S)  # as in life, less than a heartbeat may take
    watched = Watched(tmp_path)
    yield watched
    for child in watched.children.values():
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    shutil.rmtree(beats_folder(watched.run), ignore_errors=True)  # no heart has beaten in a test that was skipped


def test_ends_what_has_stalled_and_nothing_else(watched: Watched) -> None:
    """Stopped; asleep with the interpreter's lock; spinning with it; its work hung in a driver: each is killed, with
    its reason. One that works, and one that says that it loads something, live."""
    kinds = [kind for kind in KINDS if kind != "starved"]
    children = {kind: watched.start(kind) for kind in kinds}
    os.kill(children["stopped"].pid, signal.SIGSTOP)
    watched.look_until({"stopped", "hung", "spins", "driver"})
    assert {kind: child.poll() for kind, child in children.items()} == {
        "healthy": None,
        "stopped": -signal.SIGKILL,
        "hung": -signal.SIGKILL,
        "loading": None,
        "spins": -signal.SIGKILL,
        "driver": -signal.SIGKILL,
    }
    assert "stopped (state T)" in watched.line("stopped")
    assert "asleep (state S)" in watched.line("hung")
    assert "a thread of it ran for" in watched.line("spins")
    assert "asleep (state S)" in watched.line("driver")
    assert all(
        "the last that it said: 'at work'; it is killed" in watched.line(kind)
        for kind in ("stopped", "hung", "spins", "driver")
    )
    recorded = {fault.who for fault in watched.faults.read() if fault.kind == "stalled"}
    assert recorded == {"stopped", "hung", "spins", "driver"}
    assert watched.faults.counts()["faults/stalled"] == 4
    watched.watchdog.look()
    assert {beat.who for beat in read_beats(beats_folder(watched.run))} == {"healthy", "loading"}


def test_a_deadline_ends_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("or1_megatron.runtime.heartbeat.BEAT_S", 0.01)
    now, late = [0.0], []
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: now[0])
    monkeypatch.setattr("or1_megatron.runtime.heartbeat.time", clock)
    with Heartbeat(tmp_path, "rank 0").within(1.0, lambda: late.append(True)):
        pass
    now[0] = 2.0
    (before,) = read_beats(tmp_path)
    wait_until(lambda: any(beat.alive > before.alive + 1 for beat in read_beats(tmp_path)), "two beats")
    assert late == []


def test_leaves_a_starved_process_alone(watched: Watched) -> None:
    """It wants to compute on a core that two busy loops have: no beat for longer than the deadline, and it lives."""
    starved = watched.start("starved", core=0)
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        for loop in loops:
            os.sched_setaffinity(loop.pid, {0})
        wait_until(
            lambda: watched.watchdog.look() or any("(starved)" in line for line in watched.said),
            "the line",
            every_s=0.3,
        )
        watched.look_for(2 * HEARTBEAT_S)
        assert starved.poll() is None, watched.said
        assert not [fault for fault in watched.faults.read() if fault.kind == "stalled"]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_leaves_a_process_under_a_debugger_alone(watched: Watched) -> None:
    """It is held for longer than the deadline, and lives when it is let go."""
    child, libc = watched.start("healthy"), ctypes.CDLL(None, use_errno=True)
    attach, detach = 16, 17
    assert libc.ptrace(attach, child.pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(child.pid, os.WUNTRACED)
    watched.look_for(2 * HEARTBEAT_S)
    assert child.poll() is None and not watched.said
    assert libc.ptrace(detach, child.pid, None, None) == 0
    watched.watchdog.look()
    assert child.poll() is None and not watched.said


def test_a_stopped_child_without_a_heartbeat_is_found(watched: Watched) -> None:
    """It is named by its program, and killed."""
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, text=True) as child:
        assert child.pid in watched.watchdog.left_over()
        child.send_signal(signal.SIGSTOP)
        watched.children["sleep"] = child
        watched.look_until({"sleep"})
    assert f"'sleep' (pid {child.pid})" in watched.said[0]
    assert "stopped (state T)" in watched.said[0]
