"""A run goes on by itself after deaths and stalls: one small run of the whole trainer, with fault after fault.

Real Megatron on two ranks, two vLLM engines, Ray; nobody types a command. Not proven here: how long each takes, and
that the result is as good as an undisturbed run's (benchmarks/chaos.py).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from training import PATIENCE_S, Training, read_rows

from or1_megatron.runtime.heartbeat import beats_folder, read_beats
from or1_megatron.runtime.memory_folder import memory_folder
from or1_megatron.runtime.run_folder import RunFolder

pytestmark = pytest.mark.timeout(3000)


def process_of(run: Path, who: str) -> int:
    """The pid of the process that calls itself so; waits until there is one."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        for beat in read_beats(beats_folder(RunFolder(run).run_id)):
            if beat.who == who and psutil.pid_exists(beat.pid):
                return beat.pid
        time.sleep(0.1)
    raise AssertionError(f"no {who}")


def wait_for_rows(training: Training, run: Path, step: int) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while max((row["step"] for row in read_rows(run / "metrics.jsonl")), default=-1) < step:
        assert training.process.poll() is None, training.finish()[1][-5000:]
        assert time.monotonic() < give_up, f"no row of step {step}"
        training.descendants()
        time.sleep(0.1)


def faults(run: Path) -> list[dict[str, str]]:
    path = run / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.slow
def test_a_run_goes_on_by_itself(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path
) -> None:
    """An engine and the manager are stopped; the manager and rank 1 are killed; rank 0 is stopped, and Ray's head.

    Nothing is on disk when the ranks start again: they go on from memory.
    """
    run = tmp_path / "run"
    steps = "stages.1.steps=25"  # enough for the run to go on while the last fault is noticed
    saves = ["checkpoint.every_steps=100", "checkpoint.keep_best=false"]
    training = train(small_config(run), "run.max_restarts=3", "cluster.heartbeat_s=6", steps, *saves)
    plan = [
        ("engine 1", signal.SIGSTOP),
        ("the RolloutManager", signal.SIGKILL),
        ("the RolloutManager", signal.SIGSTOP),
        ("rank 1", signal.SIGKILL),
        ("rank 0", signal.SIGSTOP),
    ]
    for step, (who, number) in enumerate(plan, start=1):
        wait_for_rows(training, run, step)
        os.kill(process_of(run, who), number)
    wait_for_rows(training, run, len(plan) + 1)
    raylet = next(child for child in training.descendants() if child.name() == "raylet")
    raylet.send_signal(signal.SIGSTOP)
    for step in range(len(plan) + 2, 28, 5):  # each wait has its own patience
        wait_for_rows(training, run, step)
    status, output = training.finish()
    assert status == 0, output[-6000:]
    assert training.survivors() == []
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(29))
    kinds = [fault["kind"] for fault in faults(run)]
    stalled = [fault["who"] for fault in faults(run) if fault["kind"] == "stalled"]
    assert {"engine 1", "the RolloutManager", "rank 0", "'raylet'"} <= set(stalled), faults(run)
    assert kinds.count("engine") >= 1
    assert kinds.count("manager") >= 2  # when Ray dies, rank 0 first tries another manager
    assert kinds.count("restart") >= 3
    assert rows[-1]["faults/restarts"] == kinds.count("restart")
    assert "rank 0 waits in '" in output and "stopped (state T)" in output
    assert "rank 1 (pid " in output and "was killed by SIGKILL" in output
    assert output.count("The ranks start again in") == output.count(" in /dev/shm/or1_checkpoints_") >= 3
    assert memory_folder(run / "checkpoints") is None
    assert not beats_folder(RunFolder(run).run_id).is_dir() or not read_beats(beats_folder(RunFolder(run).run_id))
