"""The loop on the riddle world of ``fakes``: order of verbs, resume, stages, edge cases, and that it learns.

What these do not prove: anything of Megatron, vLLM or Ray, or that the real ports keep their contracts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Clock, Diary, RiddleStream, TablePolicy, TableRollouts, problem

from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionConfig,
    EntropyConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    KLConfig,
    SafetyConfig,
    StageConfig,
)
from or1_megatron.evaluate.held_out import HeldOut
from or1_megatron.interfaces import EnginesLost
from or1_megatron.rl.fatal_checks import ResumeError, StaleRollout, VerificationFailing
from or1_megatron.rl.loop import Loop
from or1_megatron.rl.loop_arguments import LoopConfig, Ports
from or1_megatron.rl.metrics import TrainerGpus
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.old_log_probs import MismatchTooLarge
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rl.skipped_steps import TooManySkipped
from or1_megatron.runtime.timers import StepTimer
from or1_megatron.schemas.metrics import ANY_SET, METRICS, VERBS
from or1_verify.types import Verdict

PROBLEMS = 16
STAGE = StageConfig(
    name="short", steps=3, max_response_tokens=4, prompts_per_step=8, prompts_per_update=8, group_size=8
)
TWO_STAGES = (STAGE, STAGE.model_copy(update={"name": "long", "max_response_tokens": 8}))


class Killed(BaseException):
    """The end of the process, in the place of SIGKILL."""


@dataclass
class World:
    """A loop with its fakes. A second world on the same folder is the same run, restarted."""

    folder: Path
    stages: Sequence[StageConfig] = TWO_STAGES
    every_steps: int = 1000
    evaluate_every: int = 2
    evaluated: bool = True
    stopped: bool = False
    algorithm: AlgorithmConfig = AlgorithmConfig(entropy=EntropyConfig(target=5.0, delta=0.01))
    max_error_fraction: float = 0.05
    hardware: TrainerGpus | None = None
    export_every: int = 0
    sets: tuple[str, ...] = ("riddles",)
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the LoopConfig."""
    safety: SafetyConfig = SafetyConfig()
    diary: Diary = field(default_factory=Diary)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.rollouts = TableRollouts(self.clock)
        self.policy = TablePolicy(PROBLEMS, self.rollouts, self.clock)
        self.stream = RiddleStream(PROBLEMS)
        prompts = [problem(j) for j in range(PROBLEMS)]
        longest = self.stages[-1].max_response_tokens
        sets = dict.fromkeys(self.sets, prompts)
        held_out = HeldOut(sets, self.rollouts, longest, max_error_fraction=0.05, clock=self.clock)
        config = replace(
            LoopConfig(
                seed=5,
                stages=tuple(self.stages),
                algorithm=self.algorithm,
                evaluation=EvaluationConfig(
                    data=tuple(EvaluationSetConfig(path=Path(f"{name}.jsonl")) for name in self.sets),
                    samples=8,
                    samples_during=2,
                    every_steps=self.evaluate_every,
                    seed=99,
                ),
                checkpoint=CheckpointConfig(every_steps=self.every_steps, export_hf_every_steps=self.export_every),
                layout=BatchLayout(data_ranks=2, budget_tokens=64, alignment=4),
                max_error_fraction=self.max_error_fraction,
                export_folder=self.folder / "hf",
                hardware=self.hardware,
                safety=self.safety,
            ),
            **self.changes,
        )
        self.loop = Loop(
            config,
            Ports(
                policy=self.policy,
                rollouts=self.rollouts,
                stream=self.stream,
                evaluator=held_out if self.evaluated else None,
                observer=self.diary,
                tracker=self.diary,
                keeper=CheckpointKeeper(
                    self.folder / "checkpoints",
                    keep_last=2,
                    keep_best=True,
                ),
                timer=StepTimer(self.clock),
                stop=lambda: self.stopped,
            ),
        )

    def stop(self) -> None:
        self.stopped = True

    def stop_in(self, rollout: int | None) -> None:
        """Ask for the stop in this rollout."""
        self.rollouts.stop_at, self.rollouts.on_stop = rollout, self.stop

    def run_killed_in(self, rollout: int) -> None:
        """Run until this rollout, in which the process ends."""

        def kill() -> None:
            raise Killed

        self.rollouts.stop_at, self.rollouts.on_stop = rollout, kill
        with pytest.raises(Killed):
            self.loop.run()

    def end(self) -> tuple[dict[int, dict[str, float]], dict[str, Any], np.ndarray]:
        """Return (metrics without times, state without times, weights): what a resumed run must have in common.

        A stopped step makes no handoff; the resumed run does.
        """
        timed = ("time/", "handoff/", "checkpoint/write_s", "other_share", "engine/utilization")
        rows = {s: {k: v for k, v in row.items() if not k.startswith(timed)} for s, row in self.diary.rows.items()}
        state = {name: value for name, value in self.loop.state().items() if name != "seconds"}
        return rows, state, self.policy.table.detach().numpy()


def ran(world: World) -> World:
    """Return the world after its run."""
    world.loop.run()
    return world


def stopped_in(world: World, rollout: int | None) -> World:
    """Return the world after a run that was asked to stop in this rollout."""
    world.stop_in(rollout)
    return ran(world)


def test_learns_and_filters_and_reports(tmp_path: Path) -> None:
    """30 steps lead from guessing to nearly always right; what the second stage solved does not come back; every metric
    of a row is in the table, and every metric of the table comes up in some row."""
    stages = [
        stage.model_copy(update={"steps": n})
        for stage, n in zip((*TWO_STAGES, TWO_STAGES[1]), (18, 2, 10), strict=True)
    ]
    few = {"prompts_per_step": 4, "prompts_per_update": 4, "refill_prompts": 2}  # so many are left, and two more
    stages[2] = stages[2].model_copy(update=few)
    algorithm = AlgorithmConfig(
        entropy=EntropyConfig(target=0.5, delta=0.005),
        kl=KLConfig(reference=Path("start")),
        correction=CorrectionConfig(mode="truncated"),
    )
    world = World(
        tmp_path,
        stages,
        evaluate_every=10,
        algorithm=algorithm,
        hardware=TrainerGpus(1, 1e12, 100),
        sets=("one", "two"),
    )
    result = world.loop.run()
    assert result.finished and result.steps == 30
    assert result.before is not None and result.after is not None
    assert result.before.accuracy < 0.2 and result.after.accuracy > 0.9
    rows = world.diary.rows
    assert sorted(rows) == list(range(31))
    known = {
        metric.name for metric in METRICS if not metric.name.startswith(("faults/", "memory/"))
    }  # the run adds those
    seen = {re.sub("/(one|two)/", f"/{ANY_SET}/", re.sub("@[248]$", "@<k>", name)) for r in rows.values() for name in r}
    assert seen == {name for name in known if "best@" not in name and "<source>" not in name} - {
        "rollout/entropy",  # of engines
        "routing/bytes",  # of engines that return experts
        "routing/rerouted",
        "speculation/acceptance",  # of engines that draft
        "speculation/tokens_per_pass",
    }
    solved = {p for p, (right, n) in world.loop.state()["ledger"]["1"].items() if right == n}
    assert solved and rows[21]["filter/solved"] == len(solved)
    assert rows[21]["filter/left"] == rows[19]["filter/left"] - len(solved)
    later = {g.prompt.problem.id for step in range(21, 31) for g in world.diary.rolled[step][1]}
    assert not later & solved
    assert [world.diary.rolled[step][0] for step in (18, 19)] == ["short", "long"]
    assert [rows[step]["stage/max_response_tokens"] for step in (18, 19)] == [4, 8]


@pytest.mark.parametrize("mini_batches, reuse", [(1, 1), (2, 1), (2, 2)])
def test_the_observer_is_told_what_the_policy_made_of_each_trained_token(
    tmp_path: Path, mini_batches: int, reuse: int
) -> None:
    """It gets log-probs that the table had when the step began, which are the engine's own here, and entropies of its
    rows: on policy from the update itself, else from the pass before."""
    stage = STAGE.model_copy(update={"steps": 1, "prompts_per_update": 8 // mini_batches, "reuse": reuse})
    world = World(tmp_path, [stage])
    world.policy.table.data.normal_(generator=torch.Generator().manual_seed(1))
    table = world.policy.table.detach().clone().log_softmax(-1)
    entropy_of = -(table.exp() * table).sum(-1)
    world.loop.run()
    assert world.policy.calls.count("score") == int(mini_batches * reuse > 1)
    scores, kept = world.diary.scores[1], world.diary.rolled[1][2]
    assert scores is not None and kept
    events = zip(scores.log_probs, scores.entropies, strict=True)
    completions = [(one.group, c) for one in kept for c in one.group.completions]
    for (group, completion), (log_probs, entropies) in zip(completions, events, strict=True):
        np.testing.assert_allclose(log_probs, completion.log_probs, atol=1e-6)
        before = [*group.prompt.token_ids, *completion.token_ids[:-1]]
        np.testing.assert_allclose(entropies, entropy_of[before], atol=1e-6)


def test_order_of_verbs(tmp_path: Path) -> None:
    world = ran(World(tmp_path, [STAGE.model_copy(update={"steps": 1})]))
    before = [(0, "hand_off"), (0, "evaluate")]
    first = ["begin_stage", "take_problems", "roll_out", "verify", "sample_ahead", "observe", "assign_advantages"]
    then = ["reject", "score", "read_entropy", "batch", "update", "control_entropy"]
    done = ["hand_off", "evaluate", "measure", "report", "save", "export"]
    step = [(0, verb) for verb in [*first, *then]] + [(1, verb) for verb in done]
    assert world.diary.verbs == before + step
    assert {verb for _, verb in step} == set(VERBS)


def test_times_add_up_and_other_is_what_remains(tmp_path: Path) -> None:
    """The fakes' clock gives rollout 3, tail 0.25, update 1, handoff 0.25; row 2 also has the save after step 1 (0.5).
    Row 0 has the handoff and an evaluation of 3.25."""
    world = World(tmp_path, [STAGE], every_steps=1, evaluate_every=0)
    result = world.loop.run()
    rows = world.diary.rows
    for row in rows.values():
        verbs = sum(value for name, value in row.items() if name.removeprefix("time/") in VERBS)
        assert verbs == pytest.approx(row["time/step"])
    assert (rows[0]["time/step"], rows[0]["time/other"]) == (3.5, 0.5)
    assert (rows[1]["time/step"], rows[1]["time/other"]) == (4.5, 0.5)
    assert (rows[2]["time/step"], rows[2]["time/other"], rows[2]["time/save"]) == (5.0, 1.0, 0.5)
    assert rows[2]["other_share"] == 0.2 and rows[1]["engine/utilization"] == 0.5
    last_save_s = 0.5  # comes after the last row
    assert result.wall_s == sum(row["time/step"] for row in rows.values()) + last_save_s
    assert result.other_s == sum(row["time/other"] for row in rows.values()) + last_save_s
    assert result.seconds["roll_out"] == 9.0


def test_an_on_policy_step_needs_no_score_and_its_entropy_is_of_the_rollout_buffer(tmp_path: Path) -> None:
    """N_SGD is 1. The engines run the policy's own weights, so they differ by fp32 rounding alone. e_1 of the uniform
    table over 8 tokens is log 8, also of rejected groups, and below the target of 5: alpha is on, but c_0 = 0; from
    then on it rises by delta a step."""
    world = ran(World(tmp_path))
    rows, row = world.diary.rows, world.diary.rows[1]
    assert "score" not in world.policy.calls
    assert all(isinstance(o, ClippedPolicyLoss) and o.on_policy for _, o in world.policy.updates)
    assert row["policy/ratio"] == 1 and row["policy/clip_fraction"] == 0 and row["policy/approx_kl"] == 0
    assert row["mismatch/mean_abs"] <= row["mismatch/max_abs"] < 1e-6
    assert row["entropy/sampled"] == pytest.approx(np.log(8), abs=1e-6) and row["groups/rejected"] > 0
    assert [rows[k]["entropy/coefficient"] for k in (1, 2, 3)] == pytest.approx([0, 0.01, 0.02])
    assert [rows[k]["entropy/controller"] for k in (1, 2, 3)] == pytest.approx([0, 0.01, 0.02])


def test_several_sgd_steps_freeze_log_probs_once(tmp_path: Path) -> None:
    """D_R / D_T = 4 and reuse 2 give 8 SGD steps on 4 mini-batches of whole groups. pi_k's log-probs are from before
    the first of them; alpha does not move in between; the controller moves once."""
    stage = STAGE.model_copy(update={"steps": 2, "prompts_per_step": 16, "prompts_per_update": 4, "reuse": 2})
    world = ran(World(tmp_path, [stage], evaluate_every=0))
    assert world.policy.calls[:11] == ["hand_off", "score", *["update"] * 8, "hand_off"]
    row, kept = world.diary.rows[1], world.diary.rolled[1][2]
    assert row["sgd/steps"] == 8 and len(kept) == row["groups/kept"] >= 4
    batches = [batch for batch, _ in world.policy.updates[:8]]
    assert [batch.sample_count for batch in batches[:4]] == [batch.sample_count for batch in batches[4:]]
    assert sum(batch.sample_count for batch in batches[:4]) == 8 * len(kept)
    tokens = sum(c.token_ids.size for g in kept for c in g.group.completions)
    assert sum(batch.token_count for batch in batches[:4]) == tokens and row["sgd/response_tokens"] == 2 * tokens
    engine = {id(g.group): np.concatenate([c.log_probs for c in g.group.completions]) for g in kept}
    frozen = np.concatenate([r.policy_log_probs[r.loss_mask] for b in batches[:4] for rank in b.ranks for r in rank])
    np.testing.assert_allclose(np.sort(frozen), np.sort(np.concatenate(list(engine.values()))), atol=1e-6)
    assert {o.entropy_coefficient for _, o in world.policy.updates[:8]} == {row["entropy/coefficient"]}  # type: ignore[attr-defined]
    assert not any(o.on_policy for _, o in world.policy.updates)  # type: ignore[attr-defined]
    assert row["policy/ratio"] != 1 and row["mismatch/max_abs"] < 1e-6
    assert abs(world.diary.rows[2]["entropy/controller"] - row["entropy/controller"]) in (0.0, 0.01)


def compare(resumed: World, whole: World) -> None:
    rows, state, table = resumed.end()
    expected_rows, expected_state, expected_table = whole.end()
    assert rows == expected_rows
    assert state == expected_state and state["controller"]["coefficient"] > 0
    np.testing.assert_array_equal(table, expected_table)


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_resumed_after_a_stop_equals_uninterrupted(tmp_path: Path, stop_at: int) -> None:
    """It is stopped in each of its rollouts, those of evaluations too (before training, after steps 2, 4 and 6)."""
    whole = ran(World(tmp_path / "whole"))
    assert whole.rollouts.calls == 10
    first = World(tmp_path / "run")
    first.stop_in(stop_at)
    result = first.loop.run()
    assert result.finished == (stop_at == 11)
    second = World(tmp_path / "run", diary=first.diary)
    assert second.loop.run().finished
    assert second.diary.resumed_at == [result.steps]
    compare(second, whole)
    assert second.loop.result().before == whole.loop.result().before is not None


@pytest.mark.parametrize("killed_in", range(2, 7))
def test_a_killed_run_goes_on_from_its_newest_checkpoint(tmp_path: Path, killed_in: int) -> None:
    """There is one after each step. Not proven here: that it is whole (checkpoint/test_killed_saves.py)."""
    whole = ran(World(tmp_path / "whole"))
    first = World(tmp_path / "run", every_steps=1)
    assign, steps = first.loop.assign_advantages, iter(range(1, 7))

    def killed(*arguments: Any) -> Any:
        if next(steps) == killed_in:
            raise Killed
        return assign(*arguments)

    first.loop.assign_advantages = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.loop.run()
    second = World(tmp_path / "run", every_steps=1, diary=first.diary)
    assert second.loop.run().finished
    assert second.diary.resumed_at == [killed_in - 1]
    compare(second, whole)
    assert second.loop.saving.saved_at == 6 and (tmp_path / "run/checkpoints/step_000006/manifest.json").is_file()


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("verb", VERBS)
def test_resumed_after_a_stop_between_verbs(tmp_path: Path, verb: str, staleness: int) -> None:
    """The flag goes up just as ``verb`` of the third step (the first of no stage) begins. What the step has collected
    and not trained is in the checkpoint: with staleness, sampled again it would be of newer weights."""
    stages = TWO_STAGES if staleness == 0 else (STAGE.model_copy(update={"steps": 6}),)
    options: dict[str, Any] = {"changes": {"max_staleness": staleness}, "evaluated": staleness == 0}
    whole = ran(World(tmp_path / "whole", stages, **options))
    first = World(tmp_path / "run", stages, **options)
    started: Callable[[int, str], None] = first.diary.verb_started

    def watch(step: int, name: str) -> None:
        started(step, name)
        if (name, [n for _, n in first.diary.verbs].count("update")) == (verb, 2 + (step > 2)):
            first.stop()

    first.diary.verb_started = watch  # type: ignore[method-assign]
    result = first.loop.run()
    assert not result.finished and result.steps in (2, 3)
    second = World(tmp_path / "run", stages, **options, diary=first.diary)
    second.diary.verb_started = started  # type: ignore[method-assign]
    assert second.loop.run().finished
    compare(second, whole)
    assert not second.rollouts.collected, "what is trained is in no checkpoint"


@pytest.mark.parametrize(
    ("asked_at", "staleness"), [*((at, 0) for at in range(1, 12)), *((at, 1) for at in range(3, 8))]
)
def test_engines_that_go_with_their_node_stop_the_run(tmp_path: Path, asked_at: int, staleness: int) -> None:
    """From the ``asked_at``-th use of the engines on (rollouts, evaluations, handoffs) all of them fail, and the stop
    is asked for just then: the run is saved, and goes on to the same end."""
    changes = {"max_staleness": staleness}
    first = World(tmp_path / "run", evaluate_every=3, changes=changes)
    lose_engines(first, asked_at, first.stop)
    assert not first.loop.run().finished
    second = World(tmp_path / "run", evaluate_every=3, changes=changes, diary=first.diary)
    assert second.loop.run().finished
    whole = ran(World(tmp_path / "whole", evaluate_every=3, changes=changes))
    compare(second, whole)


@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_engines_that_are_lost_without_a_stop_end_the_run(tmp_path: Path, at: int) -> None:
    """They are lost in the handoff, the rollout and the evaluation; and while the next step is sampled."""
    world = World(tmp_path, evaluate_every=1, changes={"max_staleness": at % 2})
    lose_engines(world, at, lambda: None)
    with pytest.raises(EnginesLost, match="gone with their node"):
        world.loop.run()


def lose_engines(world: World, at: int, on_loss: Callable[[], None]) -> None:
    """Make every use of the engines from the ``at``-th on fail, and call ``on_loss`` before the first that does."""
    uses = 0

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def use(*args: Any) -> Any:
            nonlocal uses
            uses += 1
            if uses == at:
                on_loss()
            if uses >= at:
                raise EnginesLost("gone with their node")
            return method(*args)

        return use

    world.rollouts.wait_decoded = failing(world.rollouts.wait_decoded)  # type: ignore[method-assign]
    world.policy.hand_off = failing(world.policy.hand_off)  # type: ignore[method-assign]


def test_finished_run_only_exports_again(tmp_path: Path) -> None:
    World(tmp_path).loop.run()
    again = World(tmp_path)
    result = again.loop.run()
    assert result.finished and result.after is not None and result.wall_s > 0
    assert [verb for _, verb in again.diary.verbs] == ["export"] and again.diary.rows == {}


def test_checkpoints_newest_and_best(tmp_path: Path) -> None:
    """They are saved every 4 steps, at the end and at a new best evaluation (every 2 steps); the last two and the best
    are kept."""
    world = World(tmp_path, [STAGE.model_copy(update={"steps": 9})], every_steps=4, export_every=3)
    result = world.loop.run()
    left = (path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    kept = sorted(name for name in left if not name.endswith(".partial"))  # deletions may still be under way
    best = max((r.accuracy, -step) for step, r in world.diary.evaluations.items() if step)
    assert result.best_step == -best[1]
    assert kept == sorted({"step_000008", "step_000009", f"step_{result.best_step:06d}"})
    assert (tmp_path / "checkpoints" / "best").resolve().name == f"step_{result.best_step:06d}"
    assert sorted(path.name for path in tmp_path.glob("hf*")) == ["hf", "hf_step_000003", "hf_step_000006"]


def test_a_checkpoint_counts_when_it_is_written(tmp_path: Path) -> None:
    """The write of step 1 is done when step 2 ends, and told there; that of step 2 still runs when step 3 wants to
    save, and is waited for; that of step 3 at the end of the run. The keeper hears of each before the next begins."""
    world = World(tmp_path, [STAGE], every_steps=1, evaluate_every=0)
    events: list[str] = []
    keeper, policy = world.loop.ports.keeper, world.policy
    save, finish, saved = policy.save, policy.finish_save, keeper.saved

    def slow_finish(wait: bool) -> float | None:
        if not wait and events[-1] != "save 1":
            return None  # still running
        events.append("waited" if wait else "polled")
        return finish(wait)

    policy.save = lambda folder, state, _: (events.append(f"save {state['steps_done']}"), save(folder, state))[1]  # type: ignore[method-assign]
    policy.finish_save = slow_finish  # type: ignore[method-assign]
    keeper.saved = lambda step, best: (events.append(f"kept {step}"), saved(step, best))[1]  # type: ignore[method-assign]
    world.loop.run()
    first, second = ["save 1", "polled", "kept 1"], ["save 2", "waited", "kept 2"]
    assert events == [*first, *second, "save 3", "waited", "kept 3"]
    assert "checkpoint/write_s" not in world.diary.rows[2]  # it was complete when that row was written
    assert world.diary.rows[3]["checkpoint/write_s"] == 0.125
    assert world.loop.saving.take_write_s() and not world.loop.saving.take_write_s()  # of step 3, told once


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    """The error is raised a step later; older checkpoints stay, and the run resumes from them."""
    whole = ran(World(tmp_path / "whole", every_steps=1))
    world = World(tmp_path / "run", every_steps=1)
    save, finish = world.policy.save, world.policy.finish_save

    def fail(folder: Path, state: Any, responses: bytes) -> None:
        if state["steps_done"] < 4:
            save(folder, state, responses)

    def finish_or_fail(wait: bool) -> float | None:
        if world.loop.steps_done == 5:
            raise OSError("the disk is full")
        return finish(wait)

    world.policy.save, world.policy.finish_save = fail, finish_or_fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is full"):
        world.loop.run()
    assert [path.name for path in world.loop.ports.keeper.complete()] == ["step_000002", "step_000003"]  # type: ignore[attr-defined]
    again = World(tmp_path / "run", every_steps=1, diary=world.diary)
    for row in (4, 5):  # the run folder forgets them
        del again.diary.rows[row]
    assert again.loop.run().finished and again.diary.resumed_at == [3]
    compare(again, whole)


def test_step_without_any_kept_group(tmp_path: Path) -> None:
    """Every verdict is wrong in the second step: no SGD step is made, and the same weights become a new version."""
    world = World(tmp_path, [STAGE], evaluated=False)
    world.rollouts.overrule = lambda call, verdict: Verdict(0.0, "wrong", "", "", 0.0) if call == 2 else verdict
    tables: list[torch.Tensor] = []
    world.diary.verb_started = lambda step, verb: (  # type: ignore[method-assign]
        tables.append(world.policy.table.detach().clone()) if verb in ("update", "save") else None
    )
    assert world.loop.run().finished
    row = world.diary.rows[2]
    assert (row["sgd/steps"], row["groups/kept"], row["groups/rejected_all_wrong"]) == (0, 0, 8)
    assert "loss" not in row and "mismatch/mean_abs" not in row and "train/tokens_per_s" not in row
    assert torch.equal(tables[2], tables[3]) and not torch.equal(tables[0], tables[1])
    assert world.policy.calls == ["hand_off", "update", "hand_off", "hand_off", "update", "hand_off"]
    assert world.rollouts.version == 3


def test_skipped_update_is_counted_and_said(tmp_path: Path) -> None:
    world = World(tmp_path, [STAGE], evaluated=False)
    world.policy.skip_at = frozenset({1})
    result = world.loop.run()
    assert result.finished and result.skipped_updates == 1
    rows = world.diary.rows
    assert [(rows[k]["sgd/skipped"], rows[k]["sgd/skipped_in_a_row"]) for k in (1, 2, 3)] == [(0, 0), (1, 1), (0, 0)]
    assert "loss" not in rows[2] and "loss" in rows[3]
    (alarm,) = world.diary.alarms
    assert "step 2, SGD step 0: skipped, because the loss (nan)" in alarm and world.diary.alarmed_at == [2]


def test_too_many_skipped_in_a_row_end_the_run_across_a_resume(tmp_path: Path) -> None:
    """A good step after two skipped ones begins the count anew. Steps 4 and 5 are skipped, the run resumes, and step 6,
    the third, ends it."""
    long = [STAGE.model_copy(update={"steps": 8})]
    first = World(tmp_path, long, evaluated=False, every_steps=1)
    first.policy.skip_at = frozenset({0, 1, 3, 4})
    first.stop_in(6)
    assert first.loop.run().steps == 5
    second = World(tmp_path, long, evaluated=False, every_steps=1)
    second.policy.skip_at = frozenset({0})
    with pytest.raises(TooManySkipped, match=r"3 SGD steps in a row .*max_skipped_in_a_row = 3.*in step 6"):
        second.loop.run()
    assert second.loop.state()["guard"]["total"] == 5


def test_alarms_are_told_once_and_remembered(tmp_path: Path) -> None:
    """No entropy of eight tokens reaches this bound: that is one episode over the whole run, which a resume does not
    begin again."""
    safety = SafetyConfig(low_entropy=10.0)
    first = stopped_in(World(tmp_path, evaluated=False, safety=safety), 3)
    ran(World(tmp_path, evaluated=False, safety=safety, diary=first.diary))
    assert len(first.diary.alarms) == 1 and "alarm 'entropy' at step 1" in first.diary.alarms[0]
    assert [row["alarm/entropy"] for row in first.diary.rows.values() if "alarm/entropy" in row] == [1.0] * 6
    quiet = ran(World(tmp_path / "quiet", evaluated=False, safety=safety.model_copy(update={"alarms": False})))
    assert quiet.diary.alarms == [] and "alarm/entropy" not in quiet.diary.rows[1]


def test_failing_verifier_stops_the_run(tmp_path: Path) -> None:
    """With 64 responses and a bound of 0.05 the 4th error is too many; 16 time-outs are not."""
    made = iter(range(10_000))
    world = World(tmp_path, evaluated=False)
    world.rollouts.overrule = lambda _, verdict: (
        Verdict(0.0, "error" if n < 4 else "timeout", "", "sandbox died", 1.0) if (n := next(made)) < 20 else verdict
    )
    with pytest.raises(VerificationFailing, match=r"'error' on 4 of 64 responses.*0\.05.*sandbox died"):
        world.loop.run()


def test_stale_rollouts_stop_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, evaluated=False)
    load = world.rollouts.load
    world.rollouts.load = lambda table, version: load(table, version + 7)  # type: ignore[method-assign]
    with pytest.raises(StaleRollout, match=r"sample 0: engine 0 sampled it from weights version \[7\], expected 0"):
        world.loop.run()


def test_one_seed_per_step(tmp_path: Path) -> None:
    """Different steps draw differently; evaluation always with its own seed."""
    world = World(tmp_path, evaluate_every=0)
    seeds: list[int] = []
    roll_out = world.rollouts.roll_out

    def watch(*args: Any, **kwargs: Any) -> int:
        seeds.append(args[3])
        return roll_out(*args, **kwargs)

    world.rollouts.roll_out = watch  # type: ignore[method-assign]
    world.loop.run()
    assert seeds[0] == seeds[-1] == 99 and len(set(seeds[1:-1])) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_resuming_past_the_end_is_refused(tmp_path: Path) -> None:
    """A checkpoint of step 3 is refused where the stages now have 2 steps, and nothing is trained."""
    World(tmp_path, [STAGE]).loop.run()
    shorter = World(tmp_path, [STAGE.model_copy(update={"steps": 2})])
    with pytest.raises(ResumeError, match=r"checkpoint is of step 3 of stage .*, whose steps are now 2"):
        shorter.loop.run()
    assert not shorter.policy.updates


@pytest.mark.parametrize(
    ("limit", "probe", "stops"), [("stop", 0.0, True), ("stop", 0.004, False), ("warn", 0.0, False)]
)
def test_a_step_whose_engines_differ_is_not_trained_on(limit: Any, probe: float, stops: bool, tmp_path: Path) -> None:
    """From step 2 on the engines' log-probs are 0.01 nats off; rounding is 1e-4 in float32, or 3 times the probe."""
    world = World(tmp_path, safety=SafetyConfig(mismatch_limit=limit))
    sampled, hand_off = world.rollouts._group, world.policy.hand_off

    def shifted(*given: Any) -> Any:
        group, off = sampled(*given), np.float32(0.01 * (world.rollouts.version > 0))
        return replace(group, completions=tuple(replace(c, log_probs=c.log_probs + off) for c in group.completions))

    world.rollouts._group = shifted  # type: ignore[method-assign]
    world.policy.hand_off = lambda step: replace(hand_off(step), probe_mean_abs_diff=probe)  # type: ignore[method-assign]
    with pytest.raises(MismatchTooLarge, match=r"step 2: .* by 0\.01 nats") if stops else nullcontext():
        world.loop.run()
    assert world.loop.steps_done == (1 if stops else 6) and world.policy.calls.count("update") == world.loop.steps_done
    assert any("alarm 'mismatch'" in text for text in world.diary.alarms) is not stops
