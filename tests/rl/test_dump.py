"""Dumps: packed samples come back at any layout with their numbers, and the store keeps the dumps that it should.

Not proven here: that a replay of one reproduces the update (tests/parallel/test_replay.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from or1_megatron.rl.batch import pack
from or1_megatron.rl.dump import DumpError, DumpStore, UpdateDump, first_not_finite, read_dump
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.objectives.cross_entropy import CrossEntropy
from or1_megatron.rl.objectives.gspo import GSPO
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import Sample, UpdateReport

LOSS = ClippedPolicyLoss(0.2, 0.25, entropy_coefficient=0.01, temperature=0.8, on_policy=False)


def sample(prompt: list[int], response: list[int], advantage: float, mask: list[int] | None = None) -> Sample:
    return Sample(
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        advantage=advantage,
        loss_mask=np.array(mask or [1] * len(response), dtype=np.bool_),
        engine_log_probs=-np.arange(1, len(response) + 1, dtype=np.float32),
    )


SAMPLES = [
    sample([5, 6], [7, 8, 9], 0.5),
    sample([1], [2], -1.25, [1]),
    sample([3, 4, 5], [6, 7, 8, 9, 10], float("inf"), [1, 0, 1, 1, 0]),
    sample([9], [9, 9], 0.0),
]


def same(unpacked: Sample, expected: Sample) -> None:
    for name in Sample.__slots__:
        left, right = getattr(unpacked, name), getattr(expected, name)
        np.testing.assert_array_equal(left, right)
        if isinstance(right, np.ndarray):
            assert left.dtype == right.dtype


def dump(step: int = 12, update: int = 0, **changes: object) -> UpdateDump:
    log_probs = tuple(np.full(int(s.loss_mask.sum()), -0.5, dtype=np.float32) for s in SAMPLES)
    log_probs[2][1:] = np.nan, np.inf
    sums = {"loss": float("nan"), "entropy": 3.5, "max_abs_log_ratio": float("inf")}
    fields = {
        "step": step,
        "update": update,
        "reason": "skipped",
        "objective": LOSS,
        "samples": tuple(SAMPLES),
        "token_count": 9,
        "report": UpdateReport(sums, 9, float("inf"), 1e-6, True, 0.0, 0.0),
        "log_probs": log_probs,
        "context": {"model": {"hf": "m", "dtype": "float32"}, "versions": {"torch": "2"}},
    }
    return UpdateDump(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(), ("policy",), ("policy", "reference"), ("engine", "policy", "reference")])
def test_a_dump_comes_back(names: tuple[str, ...], tmp_path: Path) -> None:
    """Each kind of log-probs with values of its own, so that none can stand for another; those that are None come back
    as None. So do the samples' weights."""
    samples = [
        replace(
            one,
            weight=1.5 + place if "policy" in names else None,
            **{
                f"{kind}_log_probs": np.full(one.response_ids.size, i, np.float32) if kind in names else None
                for i, kind in enumerate(("engine", "policy", "reference"))
            },
        )
        for place, one in enumerate(SAMPLES)
    ]
    store = DumpStore(tmp_path / "dumps", 2, {})
    written = dump(samples=pack(samples, BatchLayout(2, 16, 8)).samples)
    folder = store.close(store.open(12, 0), written)
    assert folder == tmp_path / "dumps" / "step_000012_update_0"
    assert json.loads((folder / "dump.json").read_text())["seen"]["first_not_finite"] == {"2": 1}
    read = read_dump(folder)
    for left, right in zip(read.samples, samples, strict=True):
        same(left, right)
    for log_probs, expected in zip(read.log_probs, written.log_probs, strict=True):
        np.testing.assert_array_equal(log_probs, expected)
    assert read.objective == LOSS and read.context == written.context
    assert (read.step, read.update, read.reason, read.token_count) == (12, 0, "skipped", 9)
    assert read.report.sums["entropy"] == 3.5 and np.isnan(read.report.sums["loss"])
    assert read.report.grad_norm == float("inf") and read.report.skipped


def test_every_objective_of_ours_comes_back_and_an_update_that_raised(tmp_path: Path) -> None:
    store = DumpStore(tmp_path, 2, {})
    for objective in (CrossEntropy(0.7), GSPO(0.1, 0.2, entropy_coefficient=0.1, temperature=0.7, on_policy=False)):
        read = read_dump(store.close(store.open(1, 0), dump(objective=objective, log_probs=(), raised="KeyError: 1")))
        assert (read.objective, read.log_probs, read.raised) == (objective, (), "KeyError: 1")


def test_first_not_finite() -> None:
    values = [np.array([1.0, 2.0]), np.array([1.0, np.nan, np.inf]), np.array([]), np.array([-np.inf])]
    assert first_not_finite([v.astype(np.float32) for v in values]) == {1: 1, 3: 0}


def test_the_newest_stay_and_those_asked_for(tmp_path: Path) -> None:
    """Keep 2: the last two in number, not in name; step 3 was asked for. A half-written one goes."""
    store = DumpStore(tmp_path, 2, {})
    (tmp_path / "step_000001_update_0.partial").mkdir()
    store.close(store.open(3, 0), dump(3, reason="asked"))
    for step, update in ((8, 0), (9, 3), (11, 2), (11, 10)):
        store.close(store.open(step, update), dump(step, update))
    names = ["step_000003_update_0", "step_000011_update_2", "step_000011_update_10"]
    assert [path.name for path in store.kept()] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    store.close(store.open(11, 10), dump(11, 10))  # the same step again, after a resume
    assert [path.name for path in store.kept()] == names


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"objective": {"name": "os.system", "fields": {}}}, r"dump\.json: .* = os\.system: unknown objective"),
        ({"objective": {"name": "clipped", "fields": {"clip": 0.2}}}, r"args\.clip: objective clipped has no such"),
        ({"format": 4}, "format 4, expected 5; replay it with the version that wrote it"),
        ({}, r"samples\.npz: not readable"),  # cut short
    ],
)
def test_what_is_no_dump_is_named(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    with pytest.raises(DumpError, match=r"dump\.json: no such file; expected a dump folder"):
        read_dump(tmp_path)
    store = DumpStore(tmp_path, 2, {})
    folder = store.close(store.open(1, 0), dump(1))
    record = json.loads((folder / "dump.json").read_text())
    (folder / "dump.json").write_text(json.dumps(record | change))
    (folder / "samples.npz").write_bytes((folder / "samples.npz").read_bytes()[:100])
    with pytest.raises(DumpError, match=expected):
        read_dump(folder)
