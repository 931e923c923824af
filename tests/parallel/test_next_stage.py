"""Stage 1 on one rank, stage 2 in a run of its own on two pipeline stages, against one run of both.

Given the same rollouts. What is carried over is equal to the bit; what is then computed at another layout agrees to
rounding. Not proven here: engines, several nodes, ``or1 train --stage`` itself (train/test_stage_command).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from recorded_run import STAGES, Run

from or1_megatron.checkpoint.sharded_state import local_shards
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.rl.loop_arguments import Begin


def parts(policy: MegatronPolicy) -> dict[str, Any]:
    """Return digests of all parts of parameters and moments by place in the whole model, and step counts.

    At layouts without data or tensor parallelism each lies whole on one rank, so that they can be compared.
    """
    mine = {
        f"{part.key} {part.offset}": hashlib.sha256(part.of(shard.tensor()).numpy().tobytes()).hexdigest()
        for shard in local_shards(policy)
        for part in shard.slices
    }
    everyone: list[dict[str, str]] = [{} for _ in range(policy.mesh.world)]
    dist.all_gather_object(everyone, mine)
    merged = {place: digest for mine_of_rank in everyone for place, digest in mine_of_rank.items()}
    groups = [group for one in policy.optimizer.chained_optimizers for group in one.optimizer.param_groups]
    (adam,) = {group.get("step", 0) for group in groups}
    return {"digests": merged, "sgd_steps": policy.sgd_steps, "adam_steps": adam}


class Begun(Run):
    """Notes what it holds as its first step begins, and again before its first update."""

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, **changes)
        self.seen: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        started = self.diary.verb_started

        def watch(step: int, verb: str) -> None:
            if verb == "begin_stage" and self._state is None:
                self._state = self.state()
            started(step, verb)

        self.diary.verb_started = watch  # type: ignore[method-assign]
        update = self._lockstep._verbs["update"]

        def noting(*args: Any) -> Any:
            if not self.seen:
                self.seen = parts(self.policy)
            return update(*args)

        self._lockstep._verbs["update"] = noting  # type: ignore[index]

    def result(self) -> dict[str, Any] | None:
        ended = self.to_the_end()
        return {"begins": self._state, "before_update": self.seen, "end": ended, "parts": parts(self.policy)}


def start(model: Path, layout: dict[str, Any], scratch: Path, name: str, stages: Any, **changes: Any) -> Any:
    return Begun(model, layout, scratch / name, scratch / "rollouts.pickle", 1, stages, **changes).result()


def first_runs(model: Path, scratch: Path) -> tuple[Any, ...]:
    """Both stages in one go, and stage 1 in a run of its own."""
    layout = {"ranks": 1}
    whole = start(model, layout, scratch, "whole", STAGES)
    return whole, start(model, layout, scratch, "stage_1", STAGES, stage_count=1)


def second_runs(model: Path, scratch: Path) -> tuple[Any, ...]:
    """Stage 2 from that run's checkpoint; once more with an optimizer and a controller that begin afresh."""
    layout = {"ranks": 2, "pipeline": 2}
    begin = Begin(scratch / "stage_1" / "checkpoints" / "step_000003", 1, chosen=False)
    afresh = STAGES[1].model_copy(update={"restart_optimizer": True, "restart_controller": True})
    return tuple(
        start(model, layout, scratch, name, (STAGES[0], second), begin=begin, stage_count=2)
        for name, second in (("stage_2", STAGES[1]), ("afresh", afresh))
    )


@pytest.mark.slow
def test_stage_2_at_another_layout(tiny_qwen2: Path, tmp_path: Path) -> None:
    whole, first = ranks.call(first_runs, 1, tiny_qwen2, tmp_path)[0]
    second, afresh = ranks.call(second_runs, 2, tiny_qwen2, tmp_path)[0]

    # Where stage 1 ended, stage 2 begins: every weight and moment, the step counts, and the loop's state.
    assert first["parts"]["sgd_steps"] == first["parts"]["adam_steps"] == 3
    assert second["before_update"] == first["parts"] and len(first["parts"]["digests"]) > 100
    carried = ("steps_done", "controller", "ledger", "stream", "guard", "schedule", "rejected_in_a_row")
    for name in carried:
        assert second["begins"][name] == first["end"]["state"][name], name

    # To the end it goes as the run of both: cursor, filter, controller; numbers to rounding, since layouts round apart.
    assert sorted(second["end"]["rows"]) == [4, 5, 6] and second["end"]["steps"] == whole["end"]["steps"] == 9
    for name in ("steps_done", "controller", "ledger", "stream", "schedule"):
        assert second["end"]["state"][name] == whole["end"]["state"][name], name
    for step in (4, 5, 6):
        ours, theirs = (run["end"]["rows"][step] for run in (second, whole))
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
    assert afresh["end"]["rows"][4]["entropy/controller"] == 0 < second["end"]["rows"][4]["entropy/controller"]
    assert afresh["end"]["rows"][4]["policy/learning_rate"] == pytest.approx(1e-2 * 2 / 4)
    assert second["end"]["rows"][4]["policy/learning_rate"] == pytest.approx(1e-2)
