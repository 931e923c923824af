"""Stage 1 on one rank, stage 2 in a run of its own on two pipeline stages, against one run of both.

Given the same rollouts. What is carried over is equal to the bit; what is then computed at another layout agrees to
rounding. Not proven here: engines, several nodes, ``or1 train --stage`` itself (train/test_stage_command).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks


def run(out: Path, model: Path, layout: dict[str, Any], part: str) -> dict[str, Any]:
    told: dict[str, Any] = ranks.run_json(
        "next_stage_worker.py", layout["ranks"], out, str(model), json.dumps(layout), part
    )
    return told


@pytest.mark.slow
def test_stage_2_at_another_layout(tiny_qwen2: Path, tmp_path: Path) -> None:
    told = run(tmp_path / "first.json", tiny_qwen2, {"ranks": 1}, "first")
    told |= run(tmp_path / "second.json", tiny_qwen2, {"ranks": 2, "pipeline": 2}, "second")
    whole, first, second, afresh = (told[name] for name in ("whole", "stage_1", "stage_2", "afresh"))

    # Where stage 1 ended, stage 2 begins: every weight and moment, the step counts, and the loop's state.
    assert first["parts"]["sgd_steps"] == first["parts"]["adam_steps"] == 3
    assert second["before_update"] == first["parts"] and len(first["parts"]["digests"]) > 100
    carried = ("steps_done", "controller", "ledger", "stream", "guard", "schedule", "rejected_in_a_row")
    for name in carried:
        assert second["begins"][name] == first["end"]["state"][name], name

    # To the end it goes as the run of both: cursor, filter, controller; numbers to rounding, since layouts round apart.
    assert sorted(second["end"]["rows"]) == list("456") and second["end"]["steps"] == whole["end"]["steps"] == 9
    for name in ("steps_done", "controller", "ledger", "stream", "schedule"):
        assert second["end"]["state"][name] == whole["end"]["state"][name], name
    for step in "456":
        ours, theirs = (told["end"]["rows"][step] for told in (second, whole))
        for name in ("loss", "policy/grad_norm", "entropy/full", "filter/solved", "entropy/coefficient"):
            assert (name in ours) == (name in theirs)
            assert name not in ours or ours[name] == pytest.approx(theirs[name], rel=1e-4), (step, name)

    # Afresh: the same weights, moments of 0, and the schedule of the learning rate (4 steps of warm-up) from its first.
    assert afresh["before_update"]["sgd_steps"] == afresh["before_update"]["adam_steps"] == 0
    ours, theirs = afresh["before_update"]["digests"], first["parts"]["digests"]
    moments = {place for place in ours if "exp_avg" in place}
    assert 0 < len(moments) < len(ours)
    assert {place: ours[place] for place in ours.keys() - moments} == {
        place: theirs[place] for place in ours.keys() - moments
    }
    assert not any(ours[place] == theirs[place] for place in moments)
    assert afresh["end"]["rows"]["4"]["entropy/controller"] == 0 < second["end"]["rows"]["4"]["entropy/controller"]
    assert afresh["end"]["rows"]["4"]["policy/learning_rate"] == pytest.approx(1e-2 * 2 / 4)
    assert second["end"]["rows"]["4"]["policy/learning_rate"] == pytest.approx(1e-2)
