"""Whole runs of ``or1 train`` whose handoffs go wrong: what must stop does, and what can go on does.

The faults are brought into the run's processes by tests/train/sabotage. Not tried: GPUs, several nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from training import Training, read_rows

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.slow
def test_a_run_outlives_its_engines(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path
) -> None:
    """Engines that take turns with the trainer die while receiving, when loaded but not checked, while decoding, and
    before they sleep; the manager dies, too: the run goes on to its end. Not shown: the memory of a GPU. Engines beside
    the trainer die in test_in_flight_over_handoffs."""
    run, done = tmp_path / "run", tmp_path / "done"
    done.mkdir()
    training = train(small_config(run), "rollout.max_engine_restarts=4", SABOTAGE="turns", SABOTAGE_FOLDER=str(done))
    status, output = training.finish(timeout_s=1600)  # five attempts
    assert status == 0, output[-3000:]
    engines = {"receiving", "loaded", "decoding", "before sleep"}
    assert {path.name for path in done.iterdir()} == engines | {"collecting"}
    assert len(re.findall(r"engine \d is lost and is started again", output)) >= len(engines), output[-3000:]
    rows = [row for row in read_rows(run / "metrics.jsonl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["handoff/probe_max_abs_diff"] < 1e-3 for row in rows)
    for path in (run / "rollouts").glob("step_*.parquet"):
        assert parquet.read_table(path).num_rows == 8 * 4
    assert training.survivors() == []


@pytest.mark.slow
def test_bits_that_flip_in_memory_are_found_before_they_train(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path
) -> None:
    """An exponent bit of an engine's norm, later a bit of a batch on its way to rank 1. Each time the ranks start again
    from the newest checkpoint. Bits of messages to engines: handoff/test_faults; of others: runtime/test_message. Not
    shown: flips in the trainer's own memory."""
    run = tmp_path / "run"
    config = small_config(run)
    (tmp_path / "done").mkdir()
    training = train(
        config,
        "parallel.pipeline=1",
        "rollout.engines=1",
        "evaluate.data=[]",
        "evaluate.every_steps=0",
        "run.max_restarts=2",
        "parallel.offload=never",
        "stages.0.steps=2",
        "stages.1.steps=1",
        SABOTAGE="memory",
        SABOTAGE_FOLDER=str(tmp_path / "done"),
    )
    status, output = training.finish(timeout_s=1600)
    assert status == 0, output[-3000:]
    assert {path.name for path in (tmp_path / "done").iterdir()} == {"engine", "batch"}
    assert "engine 0 does not compute what the policy computes" in output
    assert re.search(r"a message of \d+ bytes between two processes of the run arrived with", output)
    assert output.count("The ranks start again") == 2
    rows = [row for row in read_rows(run / "metrics.jsonl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert training.survivors() == []
