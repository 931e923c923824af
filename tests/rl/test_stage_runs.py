"""Stages as the loop runs them, on the riddle world: one run for all or one each, plateaus, filters, restarts, refill,
stale rollouts, and evaluations that leave no trace.

Not proven here: anything of Megatron, vLLM or Ray (parallel/test_next_stage, rollout/test_manager).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import problem
from test_loop import PROBLEMS, STAGE, World, ran, stopped_in

from or1_megatron.checkpoint.manifest import write_manifest
from or1_megatron.config.schema import SafetyConfig, StageConfig, StageEvaluationConfig
from or1_megatron.data.stream import MixtureStream, PromptSource
from or1_megatron.rl.fatal_checks import AllRejected, NoPromptsLeft, ResumeError
from or1_megatron.rl.loop import Loop
from or1_megatron.rl.loop_arguments import Begin
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.runtime.run_folder import FINISHED_RESPONSES
from or1_megatron.types import Group, Prompt, Sampling
from or1_verify.types import Verdict


def stages(*changes: dict[str, Any]) -> tuple[StageConfig, ...]:
    """Stages called s0, s1, ..., each STAGE with these changes."""
    return tuple(
        StageConfig.model_validate({**STAGE.model_dump(), "name": f"s{i}", **change})
        for i, change in enumerate(changes)
    )


def trained(world: World) -> dict[str, Any]:
    """All that training has made: weights, optimizer and the loop's state without what evaluations put there."""
    state = {name: value for name, value in world.loop.state().items() if name not in ("seconds", "evaluations")}
    moments = [
        {name: np.asarray(value).tolist() for name, value in moments.items()}
        for moments in world.policy.optimizer.state_dict()["state"].values()
    ]
    return {"state": state, "table": world.policy.table.detach().numpy().tolist(), "moments": moments}


def begin(folder: Path, step: int, index: int, chosen: bool = False) -> dict[str, Any]:
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    return {"begin": Begin(checkpoint, index, chosen), "stage_count": index + 1}


def test_stage_by_stage_equals_all_in_one_go(tmp_path: Path) -> None:
    whole = ran(World(tmp_path / "whole"))
    first = World(tmp_path / "first", changes={"stage_count": 1})
    assert first.loop.run().finished and first.loop.steps_done == 3
    second = World(tmp_path / "second", changes=begin(tmp_path / "first", 3, 1))
    result = second.loop.run()
    assert result.finished and result.steps == 6
    assert trained(second) == trained(whole)
    rows = [{k: v for k, v in world.diary.rows[5].items() if "/" in k and "time" not in k} for world in (second, whole)]
    assert rows[0] == rows[1]
    # What is a run's own: its evaluation before training is of its first weights, and its first row is theirs.
    assert sorted(second.diary.rows) == [3, 4, 5, 6] and "reward/mean" not in second.diary.rows[3]
    assert result.before is not None and first.loop.result().after is not None
    assert result.before.accuracy == first.loop.result().after.accuracy  # type: ignore[union-attr]
    assert second.diary.resumed_at == []


def test_a_stage_run_is_resumed_from_itself(tmp_path: Path) -> None:
    World(tmp_path / "first", changes={"stage_count": 1}).loop.run()
    whole = ran(World(tmp_path / "whole", changes=begin(tmp_path / "first", 3, 1)))
    stopped = stopped_in(World(tmp_path / "run", changes=begin(tmp_path / "first", 3, 1)), 3)
    assert stopped.loop.steps_done == 4
    again = World(tmp_path / "run", changes=begin(tmp_path / "first", 3, 1))
    assert again.loop.run().finished and again.diary.resumed_at == [4]
    assert trained(again) == trained(whole)
    assert again.loop.result().before == whole.loop.result().before


def test_a_stage_begins_only_where_the_one_before_ended(tmp_path: Path) -> None:
    World(tmp_path, changes={"stage_count": 1}, every_steps=1).loop.run()
    too_soon = World(tmp_path / "no", changes=begin(tmp_path, 2, 1))
    with pytest.raises(ResumeError, match=r"step_000002 is of step 2 of stage 'short'.*stages\.0\.steps=2"):
        too_soon.loop.run()
    chosen = World(tmp_path / "yes", changes=begin(tmp_path, 2, 1, chosen=True))
    assert chosen.loop.run().steps == 5 and chosen.loop.state()["schedule"]["ends"] == ["chosen"]


def test_what_a_stage_begins_afresh(tmp_path: Path) -> None:
    """The controller rises by 0.01 a step; moments are gone at the first update of a stage that restarts them."""
    for restart, first_c in ((False, 0.03), (True, 0.0)):
        given = stages({}, {"restart_optimizer": restart, "restart_controller": restart})
        world = World(tmp_path / str(restart), given)
        counts: list[int] = []
        update = world.policy.update

        def watch(*args: Any, _world: World = world, _update: Any = update, _counts: list[int] = counts) -> Any:
            report = _update(*args)
            _counts.append(int(next(iter(_world.policy.optimizer.state.values()))["step"]))
            return report

        world.policy.update = watch  # type: ignore[method-assign]
        world.loop.run()
        assert world.diary.rows[4]["entropy/controller"] == pytest.approx(first_c)
        assert counts == ([1, 2, 3, 1, 2, 3] if restart else [1, 2, 3, 4, 5, 6])


PLATEAU = {"metric": "accuracy/all", "window": 2, "gain": 1.0}
"""Flat as soon as there are two blocks: after four steps."""


@pytest.mark.parametrize("stop_at", [None, *range(2, 9)])
def test_a_plateau_ends_a_stage_and_a_resume_decides_the_same(tmp_path: Path, stop_at: int | None) -> None:
    given = stages({"steps": 9, "plateau": PLATEAU}, {"steps": 3})
    world = stopped_in(World(tmp_path, given, evaluate_every=0), stop_at)
    if stop_at is not None:
        world = ran(World(tmp_path, given, evaluate_every=0, diary=world.diary))
    assert world.loop.finished and world.loop.steps_done == 7
    assert [world.diary.rolled[step][0] for step in range(1, 8)] == ["s0"] * 4 + ["s1"] * 3
    assert world.loop.result().after is not None


def test_a_plateau_at_the_end_is_evaluated_as_an_end(tmp_path: Path) -> None:
    """By its own accuracy, and by evaluations every step: k is 2 on the way, 8 at the end."""
    for metric in ("accuracy/all", "evaluation/accuracy"):
        given = stages({"steps": 9, "plateau": {**PLATEAU, "metric": metric}})
        world = World(tmp_path / metric, given, evaluate_every=int("evaluation" in metric))
        result = world.loop.run()
        assert result.finished and result.steps == 4
        assert result.after is not None and result.after.samples == 8
        assert world.diary.rows[4]["evaluation/samples"] == 8
        assert (tmp_path / metric / "checkpoints" / "step_000004").is_dir()


@pytest.mark.parametrize("verb", ["evaluate", "measure", "report", "save"])
def test_an_evaluation_that_a_stop_left_out_counts_for_the_plateau(tmp_path: Path, verb: str) -> None:
    """The flag goes up in the fourth step, whose evaluation ends the stage: before it, and after."""
    given = stages({"steps": 9, "plateau": {**PLATEAU, "metric": "evaluation/accuracy"}}, {"steps": 2})
    whole = ran(World(tmp_path / "whole", given, evaluate_every=1))
    world = World(tmp_path / "run", given, evaluate_every=1)
    started = world.diary.verb_started
    world.diary.verb_started = lambda step, name: (  # type: ignore[method-assign]
        world.stop() if (step, name) == (4, verb) else None,
        started(step, name),
    )
    assert world.loop.run().steps == 4
    again = World(tmp_path / "run", given, evaluate_every=1)
    assert again.loop.run().finished and again.loop.steps_done == 6
    assert trained(again) == trained(whole)


def test_evaluations_leave_no_trace(tmp_path: Path) -> None:
    """Bit for bit: weights, moments, data cursor, controller, ledger and every metric of a step."""
    not_training = ("time/", "evaluation/", "other", "engine/util", "checkpoint/")
    ends = []
    for every, evaluated in ((0, False), (1, True), (2, True)):
        world = ran(World(tmp_path / f"{every}", evaluate_every=every, evaluated=evaluated, sets=("one", "two")))
        rows = {
            step: {k: v for k, v in row.items() if not k.startswith(not_training)}
            for step, row in world.diary.rows.items()
            if step
        }
        ends.append((trained(world), rows))
    assert ends[0] == ends[1] == ends[2]


def test_evaluation_settings_of_a_stage(tmp_path: Path) -> None:
    """s0 is evaluated every step with k 2, s1 every other with k 3 and T 5; a new kind of result, a new best."""
    other = StageEvaluationConfig(every_steps=2, samples_during=3, max_response_tokens=5).model_dump()
    world = World(tmp_path, stages({"steps": 2}, {"steps": 4, "evaluate": other}), evaluate_every=1)
    asked: list[tuple[int, int]] = []
    roll_out = world.rollouts.roll_out

    def noted(prompts: Any, size: int, sampling: Sampling, seed: int, *rest: Any, **named: Any) -> int:
        if seed == 99:
            asked.append((size, sampling.max_response_tokens))
        return roll_out(prompts, size, sampling, seed, *rest, **named)

    world.rollouts.roll_out = noted  # type: ignore[method-assign]
    result = world.loop.run()
    assert asked == [(8, 4), (2, 4), (2, 4), (3, 5), (8, 5)]
    assert sorted(world.diary.evaluations) == [0, 1, 2, 4, 6] and result.best_step in (4, 6)


def test_filters_by_pass_rate(tmp_path: Path) -> None:
    """Right are riddles 0 to 3 always, 4 to 7 never, the others by chance, whatever the policy says."""
    given = stages(
        {"prompts_per_step": 16, "prompts_per_update": 16, "steps": 1},
        {"prompts_per_step": 4, "prompts_per_update": 4, "min_pass_rate": 0.01, "max_pass_rate": 0.9},
    )
    world = World(tmp_path, given, evaluated=False)
    judge_by_problem(world)
    world.loop.run()
    assert (world.diary.rows[2]["filter/solved"], world.diary.rows[2]["filter/outside"]) == (4, 4)
    assert world.diary.rows[2]["filter/left"] == 8
    assert set().union(*problems_of(world, range(2, 5))) == set(range(8, 16))


def judge_by_problem(world: World) -> None:
    make = world.rollouts._group

    def judged(prompt: Prompt, size: int, *rest: Any) -> Group:
        group, j = make(prompt, size, *rest), int(prompt.problem.id[1:])
        right = [j < 4 or (j >= 8 and i % 2 == 0) for i in range(size)]
        verdicts = tuple(Verdict(float(r), "right" if r else "wrong", "", "", 0.0) for r in right)
        whole = tuple(replace(completion, finish_reason="stop") for completion in group.completions)
        return replace(group, completions=whole, verdicts=verdicts)

    world.rollouts._group = judged  # type: ignore[method-assign]


def test_a_filter_that_leaves_too_few(tmp_path: Path) -> None:
    given = stages({"prompts_per_step": 16, "prompts_per_update": 16, "steps": 1}, {"steps": 1, "max_pass_rate": 0.4})
    world = World(tmp_path, given, evaluated=False)
    judge_by_problem(world)
    said = (
        r"stage 's1': its filters drop 12 prompts .* leaves 4, fewer than prompts_per_step = 8; loosen .*max_pass_rate"
    )
    with pytest.raises(NoPromptsLeft, match=said):
        world.loop.run()


def test_steps_without_a_kept_group_end_the_run_at_the_limit(tmp_path: Path) -> None:
    """Two in a row are tolerated, a good step and a new stage start anew; across a resume the third ends it."""
    given = stages({"steps": 1}, {"steps": 8})
    safety = SafetyConfig(max_rejected_in_a_row=3)
    bad = (1, 2, 4, 5, 6)
    first = World(tmp_path, given, evaluated=False, safety=safety, every_steps=1)
    first.rollouts.overrule = lambda call, verdict: Verdict(0.0, "wrong", "", "", 0.0) if call in bad else verdict
    first.stop_in(6)
    assert first.loop.run().steps == 5
    assert [first.diary.rows[k]["groups/steps_rejected_in_a_row"] for k in range(1, 6)] == [1, 1, 0, 1, 2]
    second = World(tmp_path, given, evaluated=False, safety=safety)
    second.rollouts.overrule = lambda _, __: Verdict(0.0, "wrong", "", "", 0.0)
    with pytest.raises(
        AllRejected, match=r"3 rollout steps in a row \(safety.max_rejected_in_a_row = 3\).* 8, 0 were "
    ):
        second.loop.run()
    assert second.loop.steps_done == 5  # in its first step: two were behind it


def mixed_stream() -> MixtureStream:
    prompts = [problem(j) for j in range(PROBLEMS)]
    return MixtureStream([PromptSource(prompts[:6]), PromptSource(prompts[6:], repeat=2)], seed=3)


def problems_of(world: World, steps: Iterable[int]) -> list[list[int]]:
    """Return the problems of each step, in order."""
    return [[int(group.prompt.problem.id[1:]) for group in world.diary.rolled[step][1]] for step in steps]


def test_mixture_of_a_stage(tmp_path: Path) -> None:
    """The second stage has the second source only; a run that begins with it draws as the one that has both."""
    few = {"prompts_per_step": 4, "prompts_per_update": 4, "filter_solved": False}
    given = stages(few, few)
    mixtures = {"mixtures": ((1, 2), (0, 1))}

    whole = ran(with_stream(World(tmp_path / "whole", given, evaluated=False, changes=mixtures)))
    lowest = [min(problems) for problems in problems_of(whole, range(1, 7))]
    assert min(lowest[3:]) >= 6 > min(lowest[:3])
    with_stream(World(tmp_path / "first", given, evaluated=False, changes={**mixtures, "stage_count": 1})).loop.run()
    second = World(tmp_path / "second", given, evaluated=False, changes={**mixtures, **begin(tmp_path / "first", 3, 1)})
    with_stream(second).loop.run()
    assert trained(second) == trained(whole)


def with_stream(world: World) -> World:
    """The same world with the real stream, of two sources."""
    ports = replace(world.loop.ports, stream=mixed_stream())
    world.loop = Loop(world.loop.config, ports)
    return world


def test_refill_takes_the_shortest_run_of_prompts(tmp_path: Path) -> None:
    """Every step has 4 kept groups, the last of its groups is one of them, and what it did not need comes next."""
    given = stages({"prompts_per_step": 4, "prompts_per_update": 2, "refill_prompts": 12, "steps": 4})
    world = with_stream(World(tmp_path, given, evaluated=False))
    plain = mixed_stream()
    world.loop.run()
    for step in range(1, 5):
        _, groups, kept = world.diary.rolled[step]
        row = world.diary.rows[step]
        assert len(kept) == 4 and kept[-1].group is groups[-1]
        assert row["refill/prompts"] == len(groups) - 4 == row["groups/rejected"] and row["refill/missing"] == 0
        assert [g.prompt.problem.id for g in groups] == [p.problem.id for p in plain.take(len(groups))]
        rates = world.loop.state()["ledger"]["0"]
        assert {g.prompt.problem.id for g in groups} <= rates.keys()
    assert world.loop.state()["stream"] == plain.state()
    assert [row["sgd/steps"] for step, row in world.diary.rows.items() if step] == [2] * 4


def test_refill_is_bounded(tmp_path: Path) -> None:
    given = stages({"prompts_per_step": 4, "prompts_per_update": 2, "refill_prompts": 3, "steps": 1})
    world = with_stream(World(tmp_path, given, evaluated=False))
    world.rollouts.overrule = lambda _, __: Verdict(0.0, "wrong", "", "", 0.0)
    world.loop.run()
    row = world.diary.rows[1]
    assert (row["refill/prompts"], row["refill/missing"], row["groups/rejected"]) == (3, 4, 7)


def test_refill_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    given = stages({"prompts_per_step": 4, "prompts_per_update": 2, "refill_prompts": 8, "steps": 4})
    whole = ran(with_stream(World(tmp_path / "whole", given, evaluated=False)))
    stopped = stopped_in(with_stream(World(tmp_path / "run", given, evaluated=False)), 3)
    assert stopped.loop.steps_done == 2
    again = ran(with_stream(World(tmp_path / "run", given, evaluated=False)))
    assert trained(again) == trained(whole)


STALE = {"max_staleness": 1}


@pytest.mark.parametrize("refill", [0, 8])
def test_stale_rollouts(tmp_path: Path, refill: int) -> None:
    """Steps 1 and 5 begin a stage and are on-policy; 2 to 4 and 6 to 8 are sampled from the weights one version back,
    and rho compares with their log-probs."""
    change = {"steps": 4, "refill_prompts": refill}
    given = stages({**change}, {**change, "filter_solved": False})
    world = ran(with_stream(World(tmp_path / "stale", given, evaluate_every=2, changes=STALE)))
    rows = world.diary.rows
    assert [rows[k]["rollout/staleness"] for k in range(1, 9)] == [0, 1, 1, 1, 0, 1, 1, 1]
    # Measures of the distance are of stale responses, too; those that must be rounding alone are not.
    assert ["mismatch/k1" in rows[k] for k in range(1, 9)] == [True] * 8 and rows[2]["mismatch/chi_square"] > 1e-4
    assert ["mismatch/mean_abs" in rows[k] for k in range(1, 9)] == [True, False, False, False] * 2
    for k in range(1, 9):
        _, groups, kept = world.diary.rolled[k]
        expected = k - 1 - int(rows[k]["rollout/staleness"])
        assert {c.versions[0].version for g in groups for c in g.completions} == {expected}
        _, objective = world.policy.updates[k - 1]
        assert isinstance(objective, ClippedPolicyLoss)
        assert objective.on_policy == (k in (1, 5)) and (rows[k]["policy/ratio"] == 1) == (k in (1, 5))
        assert ("mismatch/mean_abs" in rows[k]) == (k in (1, 5))
        batch, _ = world.policy.updates[k - 1]
        engines = np.concatenate([c.log_probs for g in kept for c in g.group.completions])
        frozen = np.concatenate([row.engine_log_probs[row.loss_mask] for rank in batch.ranks for row in rank])
        np.testing.assert_array_equal(np.sort(frozen), np.sort(engines))
    assert "score" not in world.policy.calls


@pytest.mark.parametrize("ends", ["stopped, and its responses are lost", "killed, with the next step sampled already"])
def test_stale_rollouts_of_a_run_that_goes_on(tmp_path: Path, ends: str) -> None:
    """No prompt is skipped. What is lost is sampled again, with the same seed, from the policy itself: staleness 0."""
    given = stages({"steps": 6})
    whole = ran(with_stream(World(tmp_path / "whole", given, evaluated=False, changes=STALE)))
    first = with_stream(World(tmp_path / "run", given, evaluated=False, every_steps=1, changes=STALE))
    if ends.startswith("stopped"):
        first.stop_in(5)
        first.rollouts.finished_responses = lambda: b""  # type: ignore[method-assign]
        first.loop.run()
    else:
        first.run_killed_in(5)
    again = ran(with_stream(World(tmp_path / "run", given, evaluated=False, changes=STALE)))
    assert again.diary.resumed_at == [4]
    assert again.diary.rows[5]["rollout/staleness"] == int(ends.startswith("killed"))
    assert again.diary.rows[6]["rollout/staleness"] == 1
    assert problems_of(again, (5, 6)) == problems_of(whole, (5, 6))


def test_a_stage_that_a_resume_ends_leaves_its_responses_behind(tmp_path: Path) -> None:
    """The run is stopped in step 3 of the first stage, of which the checkpoint has the responses, of up to 4 tokens. It
    is resumed with two steps in this stage: step 3 is now of the second, where the same place in a step has the same
    seed, and T is 8. The real client is tested in rollout/test_manager."""
    first, second = {"steps": 4}, {"steps": 2, "max_response_tokens": 8, "filter_solved": False}
    stopped = stopped_in(World(tmp_path, stages(first, second), evaluated=False), 3)
    assert stopped.loop.steps_done == 2
    assert (tmp_path / "checkpoints" / "step_000002" / FINISHED_RESPONSES).is_file()
    again = World(tmp_path, stages({"steps": 2}, second), evaluated=False)
    assert again.loop.run().steps == 4
    stage, groups, _ = again.diary.rolled[3]
    cut = {c.token_ids.size for group in groups for c in group.completions if c.truncated}
    assert stage == "s1" and cut == {8}


def test_a_stage_that_a_resume_moves_forward_begins_with_the_policys_own_responses(tmp_path: Path) -> None:
    """As above, with stages that sample alike: the next one asks the same prompts with the same seeds, and what was
    sampled ahead is of older weights. The bound of staleness would allow it; a stage's first step is never stale."""
    changes, second = {"max_staleness": 2}, {"steps": 4, "filter_solved": False}
    stopped = stopped_in(World(tmp_path, stages({"steps": 6}, second), evaluated=False, changes=changes), 4)
    assert stopped.loop.steps_done == 3
    again = ran(World(tmp_path, stages({"steps": 3}, second), evaluated=False, changes=changes))
    assert [again.diary.rows[step]["rollout/staleness"] for step in (4, 5, 6, 7)] == [0, 1, 2, 2]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resume_that_ends_the_run_leaves_its_responses_behind(tmp_path: Path, staleness: int) -> None:
    """The run of six steps is stopped in its fourth, and resumed with three: it is over, and nobody asks for them."""
    changes = {"max_staleness": staleness}
    stopped = stopped_in(World(tmp_path, stages({"steps": 6}), evaluated=False, changes=changes), 4)
    assert stopped.loop.steps_done == 3
    assert (tmp_path / "checkpoints" / "step_000003" / FINISHED_RESPONSES).is_file()
    again = World(tmp_path, stages({"steps": 3}), evaluated=False, changes=changes)
    assert again.loop.run().finished and not again.rollouts.restored


def test_stale_rollouts_before_a_possible_plateau(tmp_path: Path) -> None:
    """The second full block may end the stage (step 4, and does): step 5, of the next, is not sampled ahead."""
    given = stages({"steps": 9, "plateau": PLATEAU}, {"steps": 2})
    world = ran(with_stream(World(tmp_path, given, evaluated=False, changes=STALE)))
    assert [world.diary.rows[k]["rollout/staleness"] for k in range(1, 7)] == [0, 1, 1, 1, 0, 1]


def test_times_of_stale_rollouts(tmp_path: Path) -> None:
    """On the fakes' clock nothing really overlaps; what is counted: of decoding 3 s and training 1 s in a lap the
    longer is useful."""
    world = ran(World(tmp_path, [STAGE.model_copy(update={"steps": 3})], evaluated=False, changes=STALE))
    rows = world.diary.rows
    for k in (1, 2, 3):
        assert rows[k]["time/step"] - rows[k]["time/other"] == pytest.approx(3)


def change_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the loop's state in the checkpoint of step 3."""
    file = folder / "checkpoints" / "step_000003" / "state.json"
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))
    write_manifest(file.parent)


def test_a_checkpoint_of_an_older_version(tmp_path: Path) -> None:
    World(tmp_path, [STAGE], evaluated=False).loop.run()
    change_state(tmp_path, lambda state: state.pop("schedule"))
    with pytest.raises(ResumeError, match=r"of step 3 was written by an older version: its loop.json lacks schedule\."):
        World(tmp_path, [STAGE], evaluated=False).loop.run()


def test_a_checkpoint_with_deferred_prompts(tmp_path: Path) -> None:
    """It is of a version with rollout.tail. Where it holds none, the run goes on; else it is refused, also by the next
    stage."""
    World(tmp_path, evaluated=False, changes={"stage_count": 1}).loop.run()
    change_state(tmp_path, lambda state: state.update(deferred=[], not_asked=[]))
    assert World(tmp_path, evaluated=False, changes={"stage_count": 1}).loop.run().steps == 3
    change_state(tmp_path, lambda state: state.update(deferred=[["p1", 77, 4, 2]], not_asked=["p2", "p3"]))
    for folder, changes in ((tmp_path, {"stage_count": 1}), (tmp_path / "second", begin(tmp_path, 3, 1))):
        said = r"step 3 holds 3 prompts that rollout\.tail=defer left .*: finish the stage with the version that wrote"
        with pytest.raises(ResumeError, match=said):
            World(folder, evaluated=False, changes=changes).loop.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_deeper_staleness(tmp_path: Path, depth: int) -> None:
    """Steps come 0, 1, ..., N, N versions behind in each stage, are of the prompts and seeds of the run without, and a
    plateau or a refill bounds the depth to 1. Resumed after step 3, steps are asked again from there, with their
    prompts and with what was sampled for them."""
    given = stages({"steps": 5}, {"steps": 5, "filter_solved": False})
    changes = {"max_staleness": depth}
    world = ran(with_stream(World(tmp_path / "deep", given, evaluate_every=2, changes=changes)))
    behind = [min(k, depth) for k in range(5)]
    assert [world.diary.rows[k]["rollout/staleness"] for k in range(1, 11)] == behind * 2
    plain = ran(with_stream(World(tmp_path / "plain", given, evaluate_every=2)))
    assert world.loop.state()["stream"] == plain.loop.state()["stream"]
    assert problems_of(world, range(1, 11)) == problems_of(plain, range(1, 11))
    stopped = stopped_in(with_stream(World(tmp_path / "run", given, evaluated=False, changes=changes)), 4)
    assert stopped.loop.steps_done == 3
    again = ran(with_stream(World(tmp_path / "run", given, evaluated=False, changes=changes)))
    assert [again.diary.rows[k]["rollout/staleness"] for k in (4, 5, 6)] == [min(3, depth), min(4, depth), 0]
    assert problems_of(again, range(4, 11)) == problems_of(plain, range(4, 11))
    for change in ({"refill_prompts": 8, "prompts_per_step": 4, "prompts_per_update": 4}, {"plateau": PLATEAU}):
        bounded = with_stream(
            World(tmp_path / str(sorted(change)), stages({"steps": 4, **change}), evaluated=False, changes=changes)
        )
        bounded.loop.run()
        assert max(row.get("rollout/staleness", 0) for row in bounded.diary.rows.values()) == 1
