"""Given the same rollouts, a resumed run equals an uninterrupted one to the bit: loop, Megatron policy and checkpoints.

Not proven here: that engines sample the same again (they take their seeds from the loop), and GPUs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from recorded_run import Run

from or1_megatron.runtime.run_folder import FINISHED_RESPONSES

LAYOUTS = [{"ranks": 1}, {"ranks": 2, "pipeline": 2}]


def run_again_and_again(model: Path, layout: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Run to the end, from each of three checkpoints of that run, to a stop, and on from there."""
    rollouts = scratch / "rollouts.pickle"

    def start(name: str, seed: int, **changes: Any) -> Run:
        return Run(model, layout, scratch / name, rollouts, seed, **changes)

    results = {"whole": start("whole", 1).to_the_end()}
    for step in (2, 3, 4):  # within a stage, between two, after the first step of the second
        checkpoint = f"checkpoints/step_{step:06d}"
        if dist.get_rank() == 0:
            shutil.copytree(scratch / "whole" / checkpoint, scratch / f"from_{step}" / checkpoint)
        dist.barrier()
        results[f"from {step}"] = start(f"from_{step}", 100 + step).to_the_end()
    stopped = start("stopped", 1, every_steps=3)  # so that the stop saves
    stopped.rollouts.stop_at = 5
    results["stopped"] = stopped.to_the_end()
    kept = (scratch / "stopped").glob(f"checkpoints/*/{FINISHED_RESPONSES}")
    results["stopped"]["responses of"] = [path.parent.name for path in kept]
    results["stopped, then on"] = start("stopped", 200).to_the_end()
    return results


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.slow)], ids=["1 rank", "pipeline 2"]
)
def test_a_resumed_run_is_the_uninterrupted_one(layout: dict[str, Any], tiny_qwen2: Path, tmp_path: Path) -> None:
    """Two stages of three steps with one and two updates each, saved asynchronously after every step. From the
    checkpoint of step 2, 3 (between the stages) and 4, and after a stop within step 5: every metric of the steps that
    follow, the loop's state, and on every rank parameters, moments and generators. Each start has another seed."""
    results = ranks.call(run_again_and_again, layout["ranks"], tiny_qwen2, layout, tmp_path)[0]
    whole = results.pop("whole")
    assert whole["steps"] == 3 * 1 + 3 * 2 and sorted(whole["rows"]) == list(range(1, 7))
    norms = [row["policy/grad_norm"] for row in whole["rows"].values()]
    assert len(set(norms)) == 6 and all(norm > 0 for norm in norms)

    stopped = results.pop("stopped")
    assert stopped["responses of"] == ["step_000004"]
    assert sorted(stopped["rows"]) == list(range(1, 5)) and stopped["digests"] != whole["digests"]
    for name, first in [("from 2", 3), ("from 3", 4), ("from 4", 5), ("stopped, then on", 5)]:
        resumed = results.pop(name)
        assert resumed["digests"] == whole["digests"], name
        assert resumed["state"] == whole["state"], name
        assert resumed["rows"] == {step: whole["rows"][step] for step in range(first, 7)}, name
    assert not results
