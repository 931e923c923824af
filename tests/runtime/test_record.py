"""RunRecord: an interrupted and resumed run has one record of each step. Not proven here: W&B."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from or1_megatron.config.schema import TrackConfig
from or1_megatron.interfaces import Observer, Tracker
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.record import Observers, RunRecord
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.types import EvaluationResult


def session(folder: RunFolder, resumed: int | None, steps: range, mark: float, every: int = 1) -> None:
    record = RunRecord(folder, TrackConfig(rollouts_every_steps=every), {})
    both = Observers([record])
    tracker: Tracker = both
    observer: Observer = both
    if resumed is not None:
        observer.resumed(resumed)
    for step in steps:
        observer.verb_started(step, "report")
        observer.alarmed(step + 1, f"alarm 'entropy' at step {step + 1}: {mark} is less than at step 0")
        observer.rolled_out(step + 1, "short", [], [])
        record.held_out([])
        observer.evaluated(step + 1, EvaluationResult(mark, mark, 0.0, 1.0, 0, 0, 0.0, 0.0))
        tracker.log(step + 1, {"reward/mean": np.float32(mark)})  # NumPy's scalars are numbers, too
    tracker.close()


def recorded(folder: RunFolder) -> dict[int, float]:
    return {step: row["reward/mean"] for step, row in read_steps(folder.metrics).items()}


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """Three sessions: killed at 7, resumed at 5 and killed at 6, resumed at 5 again. Told apart by a mark."""
    folder = RunFolder(tmp_path / "run")
    session(folder, None, range(7), 0.5)
    session(folder, 5, range(5, 6), 0.25)
    session(folder, 5, range(5, 8), 0.125)
    expected = dict.fromkeys(range(1, 6), 0.5) | dict.fromkeys(range(6, 9), 0.125)
    assert recorded(folder) == expected
    assert len(folder.metrics.read_text().splitlines()) == 8
    for files in (folder.rollouts, folder.evaluations):
        assert sorted(path.name for path in files.iterdir()) == [f"step_{s:06d}.parquet" for s in range(1, 9)]
    texts = {step: f"alarm 'entropy' at step {step}: {mark} is less than at step 0" for step, mark in expected.items()}
    assert {step: row["text"] for step, row in read_steps(folder.alarms).items()} == texts
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("reward/mean")} == expected


def test_rows_have_the_memory_of_host_and_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended GPU, whose peak is forgotten with each row."""
    peaks = [7, 5]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.pop(0))
    session(RunFolder(tmp_path), None, range(2), 0.5)
    rows = read_steps(RunFolder(tmp_path).metrics).values()
    assert [row["memory/gpu"] for row in rows] == [7.0, 5.0] and all(row["memory/host"] > 1e6 for row in rows)


def test_a_run_that_begins_afresh_forgets_an_earlier_try(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    session(folder, None, range(3), 0.5)
    session(folder, None, range(1), 0.25)
    assert recorded(folder) == {1: 0.25}
    assert len(list(folder.rollouts.iterdir())) == 1


def test_only_every_nth_steps_rollouts_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    session(folder, None, range(6), 0.5, every=3)
    assert sorted(path.name for path in folder.rollouts.iterdir()) == ["step_000003.parquet", "step_000006.parquet"]


def test_a_record_without_rows_writes_nothing(tmp_path: Path) -> None:
    RunRecord(RunFolder(tmp_path / "run"), TrackConfig(), {}).close()
    assert not (tmp_path / "run").exists()


def test_lines_of_one_step_are_merged(tmp_path: Path) -> None:
    """A run stopped before an evaluation adds it later, as a line of its own."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 1, "b": 3}, {"step": 2, "a": 4}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_steps(path) == {1: {"step": 1, "a": 1, "b": 3}, 2: {"step": 2, "a": 4}}


def test_all_close_though_one_fails(tmp_path: Path) -> None:
    first, last = (RunRecord(RunFolder(tmp_path / name), TrackConfig(), {}) for name in "ab")

    class Failing(RunRecord):
        def close(self) -> None:
            raise OSError("network gone")

    every = Observers([first, Failing(RunFolder(tmp_path / "c"), TrackConfig(), {}), last])
    first.log(1, {})
    last.log(1, {})
    with pytest.raises(OSError, match="network gone"):
        every.close()
    for record in (first, last):
        with pytest.raises(OSError, match="Bad file descriptor"):
            record.log(2, {})
