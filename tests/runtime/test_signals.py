"""Stop signals and dying parents, with real processes. Not proven here: when Slurm or Kubernetes send which signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from waiting import PATIENCE_S, lives, wait_until

from or1_megatron.errors import PART_LOST
from or1_megatron.runtime.signals import LAUNCH_MARK

SAVES = """
import logging, sys, threading, time, types
from or1_megatron.runtime import signals
logging.basicConfig(level=logging.INFO)
signals.REPEAT_S = float(sys.argv[1])
stop = signals.StopRequested(grace_s=30)
if "patient" in sys.argv:  # the rank's last words last until it is asked to save
    signals.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: stop._requested.wait())
handling = stop.handling_signals()
handling.__enter__()
watcher = next(thread for thread in threading.enumerate() if thread.name == "stop-signals")
print("ready", flush=True)
while not stop.requested():
    time.sleep(0.01)
print("saving", flush=True)
sys.stdin.readline()
[thread.join() for thread in threading.enumerate() if thread.name == "stop-agent"]
handling.__exit__(None, None, None)
watcher.join()  # it has acted on every signal that came before
print("saved", flush=True)
"""

# Blocks in C with the GIL released, as a collective does: no Python handler gets to run on the main thread.
STUCK = """
import ctypes, sys
from or1_megatron.runtime.signals import StopRequested
libc = ctypes.CDLL(None)
with StopRequested(grace_s=float(sys.argv[1])).handling_signals():
    print("ready", flush=True)
    while True:
        libc.sleep(60)
"""


@contextmanager
def running(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, *args], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def saving(number: signal.Signals, repeat_s: float) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that has been told to stop and saves until its input ends."""
    with running(SAVES, str(repeat_s)) as process:
        process.send_signal(number)
        assert process.stdout is not None and process.stdout.readline() == "saving\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_save_and_the_process_exits_normally(number: signal.Signals) -> None:
    with saving(number, repeat_s=2.0) as process:
        out, err = process.communicate("\n", timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "saved\n")
    assert f"{number.name}: saving and stopping within 30 s" in err


def test_torchruns_own_sigterm_ends_a_rank_unless_the_launcher_asks_for_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent sends SIGTERM to the other ranks when one has failed: they cannot save without it."""
    monkeypatch.setenv(LAUNCH_MARK, str(os.getpid()))
    with running(SAVES, "2.0") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == PART_LOST
        assert process.stderr is not None
        where = process.stderr.read()
        assert "another rank failed? The main thread is at" in where
        assert re.search("line (12|13|14), in <module>", where)  # from its "ready" on
    with running(SAVES, "1e9", "patient") as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None and process.stdout.readline() == "saving\n"
        out, _ = process.communicate("\n", timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "saved\n")


def test_a_second_signal_exits_at_once() -> None:
    with saving(signal.SIGTERM, repeat_s=0.0) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGUSR1
        assert process.stderr is not None
        assert "SIGUSR1: second stop signal; exiting without saving" in process.stderr.read()


def test_the_same_request_heard_twice_is_one() -> None:
    """A scheduler signals all processes of a job, and the launcher forwards its own signal to the ranks."""
    with saving(signal.SIGTERM, repeat_s=1e9) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate("\n", timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "saved\n")


def test_the_grace_period_ends_though_the_main_thread_is_stuck_in_c() -> None:
    with running(STUCK, "0.5") as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "not saved within the grace period of 0.5 s" in err


def test_the_block_s_end_gives_the_signals_back() -> None:
    code = """
import os, signal
from or1_megatron.runtime.signals import StopRequested
before = signal.getsignal(signal.SIGTERM)
stop = StopRequested(grace_s=1)
with stop.handling_signals():
    assert signal.getsignal(signal.SIGTERM) != before
assert signal.getsignal(signal.SIGTERM) == before
assert signal.set_wakeup_fd(-1) == -1
assert not stop.requested()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM


PARENT = """
import os, subprocess, sys, time
print("ready", flush=True)
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from or1_verify.child_process import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(120)
''', str(os.getpid())])
time.sleep(120)
"""


def test_a_child_dies_with_its_killed_parent() -> None:
    with running(PARENT) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        wait_until(lambda: not lives(child_pid), "the child to end with its parent")


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    code = "from or1_verify.child_process import die_with_parent; die_with_parent(1); print('alive')"
    assert os.getpid() != 1
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
