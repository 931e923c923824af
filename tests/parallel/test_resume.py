"""Given the same rollouts, a resumed run equals an uninterrupted one to the bit: loop, Megatron policy and checkpoints.

Not proven here: that engines sample the same again (they take their seeds from the loop), and GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks

LAYOUTS = [{"ranks": 1}, {"ranks": 2, "pipeline": 2}]


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.slow)], ids=["1 rank", "pipeline 2"]
)
def test_a_resumed_run_is_the_uninterrupted_one(layout: dict[str, Any], tiny_qwen2: Path, tmp_path: Path) -> None:
    """Two stages of three steps with one and two updates each, saved asynchronously after every step. From the
    checkpoint of step 2, 3 (between the stages) and 4, and after a stop within step 5: every metric of the steps that
    follow, the loop's state, and on every rank parameters, moments and generators. Each start has another seed."""
    out = tmp_path / "out.json"
    told = ranks.run_json("resume_worker.py", layout["ranks"], out, str(tiny_qwen2), json.dumps(layout))
    whole = told.pop("whole")
    assert whole["steps"] == 3 * 1 + 3 * 2 and sorted(whole["rows"]) == list("123456")
    norms = [row["policy/grad_norm"] for row in whole["rows"].values()]
    assert len(set(norms)) == 6 and all(norm > 0 for norm in norms)

    stopped = told.pop("stopped")
    assert stopped["responses of"] == ["step_000004"]
    assert sorted(stopped["rows"]) == list("1234") and stopped["digests"] != whole["digests"]
    for name, first in [("from 2", 3), ("from 3", 4), ("from 4", 5), ("stopped, then on", 5)]:
        resumed = told.pop(name)
        assert resumed["digests"] == whole["digests"], name
        assert resumed["state"] == whole["state"], name
        assert resumed["rows"] == {str(step): whole["rows"][str(step)] for step in range(first, 7)}, name
    assert not told
