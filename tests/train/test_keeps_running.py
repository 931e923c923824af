"""A run goes on by itself after deaths and stalls: one small run of the whole trainer, with fault after fault.

Real Megatron on two ranks, two vLLM engines, Ray; nobody types a command. Not proven here: how long each takes, and
that the result is as good as an undisturbed run's (lab/benchmarks/chaos.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from training import Training, faults, process_of, read_rows, wait_for_rows
from waiting import wait_until

from or1_megatron.runtime.heartbeat import beats_folder, read_beats
from or1_megatron.runtime.run_folder import RunFolder

pytestmark = pytest.mark.timeout(3000)


def has_stalled(run: Path, who: str) -> bool:
    return any((fault["kind"], fault["who"]) == ("stalled", who) for fault in faults(run))


@pytest.mark.slow
def test_a_run_goes_on_by_itself(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path
) -> None:
    """An engine and the manager are stopped; rank 1 is killed; rank 0 is stopped, and Ray's head.

    The ranks go on from their newest checkpoint. Engines draft tokens (ngram) all the while.
    """
    run = tmp_path / "run"
    steps = "stages.1.steps=25"  # enough for the run to go on while the last fault is noticed
    saves = ["checkpoint.every_steps=1", "checkpoint.keep_best=false"]
    ngram = "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 2}"
    drafts = f"rollout.engine_args.speculative_config={ngram}"
    config = small_config(run)
    training = train(config, "run.max_restarts=3", "cluster.heartbeat_s=6", steps, drafts, *saves)
    plan = [
        ("engine 1", signal.SIGSTOP),
        ("the RolloutManager", signal.SIGSTOP),
        ("rank 1", signal.SIGKILL),
        ("rank 0", signal.SIGSTOP),
    ]
    for step, (who, number) in enumerate(plan, start=1):
        wait_for_rows(training, run, step)
        config.write_text("nothing: that could start again\n")  # the launcher has read it
        os.kill(process_of(run, who), number)
        if number == signal.SIGSTOP:  # a row may come before it is missed, and the next fault must not come first
            wait_until(partial(has_stalled, run, who), f"the watchdog to miss {who}")
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
    assert max(row.get("speculation/tokens_per_pass", 1) for row in rows) > 1  # missing where nothing was drafted
    kinds = [fault["kind"] for fault in faults(run)]
    stalled = [fault["who"] for fault in faults(run) if fault["kind"] == "stalled"]
    assert {"engine 1", "the RolloutManager", "rank 0", "'raylet'"} <= set(stalled), faults(run)
    assert kinds.count("engine") >= 1
    assert kinds.count("manager") >= 1  # when Ray dies, rank 0 first tries another manager
    assert kinds.count("restart") >= 3
    assert rows[-1]["faults/restarts"] == kinds.count("restart")
    assert "rank 0 waits in '" in output and "stopped (state T)" in output
    assert "rank 1 (pid " in output and "was killed by SIGKILL" in output
    assert output.count("The ranks start again ") == output.count("; saved: the checkpoint of step ") >= 3
    assert not beats_folder(RunFolder(run).run_id).is_dir() or not read_beats(beats_folder(RunFolder(run).run_id))


@pytest.mark.slow
def test_a_loaded_machine_kills_nothing(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path
) -> None:
    """Beside two busy loops per core, each in a session of its own, all is late and nothing counts as stalled."""
    run = tmp_path / "run"
    loop = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop, start_new_session=True) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        training = train(small_config(run), "cluster.heartbeat_s=6")
        for step in range(1, 7):
            wait_for_rows(training, run, step)
        status, output = training.finish()
    finally:
        for process in loops:
            process.kill()
            process.wait()
    assert status == 0, output[-6000:]
    assert faults(run) == []
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(7))
