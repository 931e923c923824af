"""Stop signals and dying parents, with real processes. Nothing here proves what Slurm or Kubernetes send, or when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from or1_megatron.runtime.signals import REPEAT_S

SAVES = """
import sys, time
from or1_megatron.runtime.signals import StopRequested
stop = StopRequested(grace_s=float(sys.argv[1]))
stop.install()
print("ready", flush=True)
while not stop.requested():
    stop.wait(10)
print("saving after", stop.signal_name, flush=True)
time.sleep(float(sys.argv[2]))
stop.uninstall()
print("saved", flush=True)
"""

# Blocks in C with the GIL released, as a collective does: no Python handler gets to run on the main thread.
STUCK = """
import ctypes, sys
from or1_megatron.runtime.signals import StopRequested
stop = StopRequested(grace_s=float(sys.argv[1]), on_hard_exit=lambda: print("last words", flush=True))
stop.install()
libc = ctypes.CDLL(None)
print("ready", flush=True)
while True:
    libc.sleep(60)
"""


@contextmanager
def running(code: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_save_and_the_process_leaves_in_order(number: signal.Signals) -> None:
    with running(SAVES, "30", "0") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, f"saving after {number.name}\nsaved\n")
    assert f"{number.name}: saving and stopping within 30 s" in err


def test_a_second_signal_exits_at_once() -> None:
    with running(SAVES, "30", "60") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == "saving after SIGTERM\n"
        time.sleep(REPEAT_S + 0.1)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "SIGUSR1: second stop signal; exiting without saving" in err


def test_the_same_request_heard_twice_is_one() -> None:
    """As under a scheduler that signals all processes, when the launcher passes its signal on too."""
    with running(SAVES, "30", "0.5") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == "saving after SIGTERM\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "saved\n")


def test_the_grace_period_ends_though_the_main_thread_is_stuck_in_c() -> None:
    with running(STUCK, "0.5") as process:
        started_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started_s < 10
    assert out == "last words\n"
    assert "not saved within the grace period of 0.5 s" in err


def test_uninstall_gives_the_signals_back() -> None:
    code = """
import os, signal
from or1_megatron.runtime.signals import StopRequested
before = signal.getsignal(signal.SIGTERM)
stop = StopRequested(grace_s=1)
stop.install(); stop.uninstall(); stop.uninstall()
assert signal.getsignal(signal.SIGTERM) == before
assert signal.set_wakeup_fd(-1) == -1
assert not stop.requested() and stop.signal_name == ""
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from or1_megatron.runtime.signals import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(120)
''', str(os.getpid())])
print("ready", flush=True)
time.sleep(120)
"""


def test_a_child_dies_with_its_killed_parent() -> None:
    with running(PARENT) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        give_up_s = time.monotonic() + 10
        while _alive(child_pid):
            assert time.monotonic() < give_up_s, f"child {child_pid} outlives its parent"
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead, and its adoptive parent has not looked yet


def test_a_parent_that_is_gone_already_is_noticed() -> None:
    code = "from or1_megatron.runtime.signals import die_with_parent; die_with_parent(1); print('alive')"
    assert os.getpid() != 1
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
