"""Tests the spans of a schedule on two pipeline stages: their order in time is that of the data. Not on a GPU."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import problem
from ranks import call

from or1_megatron.parallel.schedule import time_schedules
from or1_megatron.runtime import timeline


def spans_of_an_update(model: Path, folder: Path) -> tuple[list[list], int]:
    policy, batch = problem.make_policy(model, ranks=2, pipeline=2), problem.batch(1, 64)
    os.environ[timeline.VARIABLE] = str(folder)
    timeline.join(f"rank {policy.mesh.rank}")
    time_schedules(policy.mesh.pipeline_rank, 2)
    problem.update(policy, batch)
    (file,) = folder.glob(f"*-rank_{policy.mesh.rank}-*")
    while '"optimizer"' not in (text := file.read_text()):
        time.sleep(0.05)
    return [span for line in text.splitlines() for span in json.loads(line).get("spans", ())], len(batch.ranks[0])


def test_spans_of_two_stages(tiny_qwen2: Path, tmp_path: Path) -> None:
    """Stage 1 gets micro-batch k when stage 0 has done its forward; stage 0 its gradient after stage 1's backward."""
    at = dict[tuple[str, int], list[list]]()
    for stage, (spans, micro_batches) in enumerate(call(spans_of_an_update, 2, tiny_qwen2, tmp_path)):
        for name in ("forward_step", "backward_step"):
            at[name, stage] = sorted(span[2:] for span in spans if span[0] == name)
            assert [args["stage"] for *_, args in at[name, stage]] == [stage] * micro_batches
        assert [args["micro_batch"] for *_, args in at["forward_step", stage]] == list(range(micro_batches))
        assert {span[4].get("waits_for", "other ranks") for span in spans} == {f"stage {1 - stage}", "other ranks"}
    forward = zip(at["forward_step", 0], at["forward_step", 1], strict=True)
    backward = zip(at["backward_step", 1], at["backward_step", 0], strict=True)
    assert all(first[1] <= second[0] for first, second in (*forward, *backward))  # end and start
