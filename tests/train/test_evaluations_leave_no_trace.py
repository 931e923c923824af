"""Evaluating after every step leaves a run as it would have been without any: real Megatron, vLLM and Ray.

Weights, moments and everything that follows from the sampled tokens are compared to the bit. Engines batch what arrives
together, so their log-probs may differ in the last bits from run to run, evaluated or not; what follows from those is
compared to 1e-5. Not proven here: GPUs, whose engines are not deterministic at all. On fakes all of the loop's state is
compared to the bit, in milliseconds: rl/test_stage_runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from training import Training, read_rows

NOT_TRAINING = ("time/", "evaluation/", "other_share", "engine/", "rollout/tokens_per_s", "train/", "checkpoint/")
TIMES = ("handoff/transfer_s", "handoff/probe_s", "verify/tail_s")
OF_ENGINES = ("entropy/sampled", "entropy/estimate", "mismatch/", "handoff/probe_")
"""Made of the log-probs that engines gave."""


def training_of(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(NOT_TRAINING) and name not in TIMES}
        for row in rows
        if "reward/mean" in row
    ]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_evaluations_leave_no_trace(
    small_config: Callable[[Path], Path], train: Callable[..., Training], tmp_path: Path
) -> None:
    made = []
    for name, every in (("without", "evaluate.data=[]"), ("with", "evaluate.every_steps=1")):
        run = tmp_path / name
        off = () if name == "with" else ("evaluate.every_steps=0",)
        # With two engines and two stages; log-probs of engines do not enter the loss (correction off).
        status, output = train(
            small_config(run), every, *off, "algorithm.correction.mode=off", "stages.0.steps=2", "stages.1.steps=2"
        ).finish()
        assert status == 0, output[-3000:]
        checkpoint = run / "checkpoints" / "step_000004"
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        # .metadata says where in the files each tensor lies, beside an identifier of the save that is drawn by chance.
        digests = {file: entry["sha256"] for file, entry in files.items() if file not in ("loop.json", ".metadata")}
        loop = json.loads((checkpoint / "loop.json").read_text())
        kept = {key: value for key, value in loop.items() if key not in ("seconds", "evaluations")}
        weights = (run / "hf" / "model.safetensors").read_bytes()
        rows = read_rows(run / "metrics.jsonl")
        assert sum("evaluation/accuracy" in row for row in rows) == (5 if name == "with" else 0)
        made.append((digests, kept, weights, training_of(rows)))
    (digests, loop, weights, rows), (other_digests, other_loop, other_weights, other_rows) = made
    assert weights == other_weights
    assert len(digests) > 1 and digests == other_digests
    assert len(rows) == len(other_rows) == 4
    for row, other in zip(rows, other_rows, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            tolerance = 1e-5 if name.startswith(OF_ENGINES) else 0.0
            assert value == pytest.approx(other[name], rel=0, abs=tolerance), name
    assert loop == other_loop
