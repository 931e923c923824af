"""The training loop as a list of verbs (``Loop.train_step``).

``steps_done`` counts finished rollout steps over all stages, and is at the same time the version of the weights: step
k + 1 samples from version k and ends by handing version k + 1 to the engines. That holds for a step without any SGD
step too (every group rejected): the handoff is made all the same, so that version, step and checkpoint never part.

Stopping: up to the first SGD step a step can be abandoned, since nothing but the stream and the ledger has moved; the
state saved is then the one before the step, and the resumed run repeats it with the same seed. From the first SGD step
on the step is finished, but its evaluation is left to the resumed run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from or1_megatron.config import StageConfig
from or1_megatron.interfaces import Stopped
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.alarms import Alarms, StepSeen
from or1_megatron.rl.batch import make_batches
from or1_megatron.rl.checks import check_steps, check_verdicts, check_versions
from or1_megatron.rl.entropy import ClipHighController, EntropyController, EntropyReading, estimate
from or1_megatron.rl.loss import make_objective
from or1_megatron.rl.metrics import (
    Filtered,
    Step,
    evaluation_metrics,
    measured_mismatch,
    step_metrics,
    time_metrics,
)
from or1_megatron.rl.ports import LoopConfig, LoopResult, Ports
from or1_megatron.rl.safety import SgdStep, UpdateGuard
from or1_megatron.rl.score import Scored, score
from or1_megatron.rl.stages import PassRateLedger, StageSchedule
from or1_megatron.rl.verbs import stopping_verb, verb
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import (
    AdvantagedGroup,
    Batch,
    EvaluationResult,
    Group,
    HandoffReport,
    Prompt,
    RolloutReport,
    Sample,
    Sampling,
    UpdateReport,
)

logger = logging.getLogger(__name__)


class Loop:
    """MAGIC (RECIPE): see ``train_step``."""

    def __init__(self, config: LoopConfig, ports: Ports) -> None:
        self.config = config
        self.ports = ports
        self.schedule = StageSchedule(config.stages)
        self.controller = EntropyController(config.algorithm.entropy)
        self.clip_high = ClipHighController(config.algorithm.loss, config.algorithm.entropy.target)
        self.ledger = PassRateLedger()
        self.guard = UpdateGuard(config.safety, ports.policy, ports.dumps, self._alarm)
        self.alarms = Alarms(config.safety, config.dtype)
        self.steps_done = 0
        self._before: EvaluationResult | None = None
        self._after: EvaluationResult | None = None
        self._evaluated_at: int | None = None
        self._best: tuple[int, float] | None = None  # (step, accuracy)
        self._seconds: dict[str, float] = {}  # per verb, with "step" and "other"
        self._saved_at: int | None = None
        self._saving: tuple[int, bool] | None = None  # (step, best) of the checkpoint that is being written
        self._write_s: float | None = None  # of the last one written, until a row has it
        self._snapshot: Mapping[str, Any] = {}

    def run(self) -> LoopResult:
        """Train to the end of the schedule, or until asked to stop; from the newest checkpoint when there is one."""
        try:
            self.start()
            while self.steps_done < self.schedule.total_steps:
                self.train_step()
        except Stopped:
            logger.warning(
                "stopped within step %d: going back to the state after %d", self.steps_done + 1, self.steps_done
            )
            if self._saved_at != self.steps_done:
                self._write_checkpoint(best=False)
        with self.ports.timer("save"):
            self._finish_save(wait=True)
        self._lap([])  # the last save and export belong to no row, but to the run
        return self.result()

    def train_step(self) -> None:
        """One rollout step: the recipe, a verb a line."""
        index, stage = self.schedule.index(self.steps_done), self.schedule.at(self.steps_done)
        filtered = self.filter_solved(index, stage)
        prompts = self.take_problems(stage)
        self.roll_out(prompts, stage)
        groups, rollout = self.verify()
        self.observe(index, groups)
        advantaged = self.assign_advantages(groups)
        kept, rejected = self.reject(advantaged)
        scored = self.score(kept, rejected, stage)
        reading = self.read_entropy(groups, kept, scored)
        batches = self.batch(scored.samples, stage)
        updates = self.update(batches, stage, reading)
        self.control_entropy(reading)
        self.steps_done += 1  # the policy is a new one now; what follows speaks of it
        handoff = self.hand_off()
        evaluation = self.evaluate()
        mismatch = scored.mismatch or measured_mismatch(updates)
        self.report(
            Step(index, stage, filtered, groups, kept, rejected, rollout, reading, mismatch, batches, updates, handoff),
            evaluation,
        )
        self.save()
        self.export()

    def start(self) -> None:
        """Resume, bring the engines to the policy's weights, and make the evaluation that is due, if any.

        Row 0 of the metrics is the evaluation before training. A resumed run adds to the row of its step only the
        evaluation that a stop had left out.
        """
        self.resume()
        self.ports.timer.lap()  # what came before is not the loop's time
        if self.finished:
            self.export()  # a kill may have come between the last save and the export
            return
        self._snapshot = self.state()
        self.hand_off()
        evaluation = self.evaluate()
        times = self._lap([] if evaluation is None else [evaluation])
        if evaluation is not None:
            first = times if self.steps_done == 0 else {}
            self.ports.tracker.log(self.steps_done, {**evaluation_metrics(evaluation), **first})
            if self.steps_done > 0:
                self.save()
                self.export()
        self._snapshot = self.state()

    @stopping_verb
    def filter_solved(self, index: int, stage: StageConfig) -> Filtered | None:
        """At a stage's start (but the first's): drop the problems that the previous stage solved (RECIPE section 3).

        ValueError, of the stream, when no problem would be left.
        """
        if index == 0 or not self.schedule.begins(self.steps_done) or not stage.filter_solved:
            return None
        solved = self.ledger.solved(index - 1)
        return Filtered(len(solved), self.ports.stream.exclude(solved))

    @stopping_verb
    def take_problems(self, stage: StageConfig) -> list[Prompt]:
        """D_R prompts."""
        return self.ports.stream.take(stage.prompts_per_step)

    @stopping_verb
    def roll_out(self, prompts: Sequence[Prompt], stage: StageConfig) -> None:
        """Sample gs responses to each prompt; back when the last one is decoded."""
        seed = derive_seed(self.config.seed, "rollout", self.steps_done)
        sampling = Sampling(stage.temperature, stage.top_p, stage.max_response_tokens)
        self.ports.rollouts.roll_out(prompts, stage.group_size, sampling, seed)
        self.ports.rollouts.wait_decoded()

    @stopping_verb
    def verify(self) -> tuple[list[Group], RolloutReport]:
        """Wait for the verdicts that are still out. Raises VerificationFailing and StaleRollout."""
        groups, report = self.ports.rollouts.collect()
        check_verdicts(groups, self.config.max_error_fraction)
        check_versions(groups, self.steps_done)
        return groups, report

    @stopping_verb
    def observe(self, index: int, groups: Sequence[Group]) -> None:
        """Pass rates of all groups: before any is rejected."""
        self.ledger.record(index, groups)

    @stopping_verb
    def assign_advantages(self, groups: Sequence[Group]) -> list[AdvantagedGroup]:
        return assign_advantages(groups, self.config.algorithm.advantage)

    @stopping_verb
    def reject(self, groups: Sequence[AdvantagedGroup]) -> tuple[list[AdvantagedGroup], list[AdvantagedGroup]]:
        """(kept, rejected)."""
        return reject(groups, self.config.algorithm.advantage)

    @stopping_verb
    def score(self, kept: Sequence[AdvantagedGroup], rejected: Sequence[AdvantagedGroup], stage: StageConfig) -> Scored:
        """The kept groups as samples, after what forward passes the step needs."""
        return score(self.ports.policy, kept, rejected, stage, self.config.algorithm, self.config.layout)

    @stopping_verb
    def read_entropy(self, groups: Sequence[Group], kept: Sequence[AdvantagedGroup], scored: Scored) -> EntropyReading:
        """e_k of the rollout buffer, rejected groups included unless asked otherwise, and the coefficients from it."""
        of_kept = [group.group for group in kept]
        entropy, sampled = estimate(groups, of_kept, scored.entropies, self.config.algorithm.entropy)
        alpha = self.controller.alpha(entropy)
        return EntropyReading(entropy, sampled, alpha, self.controller.coefficient, self.clip_high.value)

    @stopping_verb
    def batch(self, samples: Sequence[Sequence[Sample]], stage: StageConfig) -> list[Batch]:
        """One batch per SGD step; none when every group was rejected."""
        mini_batches = stage.prompts_per_step // stage.prompts_per_update
        aggregation = self.config.algorithm.loss.aggregation
        return make_batches(samples, mini_batches, stage.reuse, self.config.layout, aggregation)

    @stopping_verb
    def update(self, batches: Sequence[Batch], stage: StageConfig, reading: EntropyReading) -> list[UpdateReport]:
        """The SGD steps, all with the same coefficients. Raises TooManySkipped."""
        objective = make_objective(self.config.algorithm, stage, reading.alpha, reading.clip_high)
        step = self.steps_done + 1
        return [self.guard.update(SgdStep(step, i, batch, objective)) for i, batch in enumerate(batches)]

    @verb
    def control_entropy(self, reading: EntropyReading) -> None:
        """c_k -> c_{k+1}, once per rollout step; and epsilon_high's next, where it is steered."""
        self.controller.advance(reading.entropy)
        self.clip_high.advance(reading.entropy)

    @verb
    def hand_off(self) -> HandoffReport:
        return self.ports.policy.hand_off(self.steps_done)

    @verb
    def evaluate(self) -> EvaluationResult | None:
        """avg@k of the new weights, when it is due; a stop leaves it to the resumed run."""
        samples = self._samples_due()
        if self.ports.evaluator is None or samples == 0 or self.ports.stop():
            return None
        try:
            result = self.ports.evaluator.evaluate(samples)
        except Stopped:
            return None
        self._evaluated_at = self.steps_done
        if self.steps_done == 0:
            self._before = result
        elif self._best is None or result.accuracy > self._best[1]:
            self._best = (self.steps_done, result.accuracy)
        if self.steps_done == self.schedule.total_steps:
            self._after = result
        self.ports.observer.evaluated(self.steps_done, result)
        return result

    @verb
    def report(self, step: Step, evaluation: EvaluationResult | None) -> None:
        """Rollouts to the observer, one row of metrics to the tracker."""
        self.ports.observer.rolled_out(self.steps_done, step.stage.name, step.groups, step.kept)
        metrics = step_metrics(step, self.config.hardware) | {"sgd/skipped_in_a_row": float(self.guard.in_a_row)}
        if self.config.safety.alarms:
            metrics |= self._look_for_alarms(step, metrics)
        evaluations = [] if evaluation is None else [evaluation]
        for result in evaluations:
            metrics |= evaluation_metrics(result)
        if self._write_s is not None:
            metrics["checkpoint/write_s"], self._write_s = self._write_s, None
        self.ports.tracker.log(self.steps_done, {**metrics, **self._lap([step.rollout, *step.updates, *evaluations])})

    @verb
    def save(self) -> None:
        """Note the state that a stop goes back to; write a checkpoint of it when one is due.

        Due: every n steps, at the end, on a stop, and when the evaluation is the best so far. Returns when the state is
        copied: it is written while training goes on, and waited for before the next one and at the end of the run.
        """
        self._finish_save(wait=False)
        self._snapshot = self.state()
        best = self._best is not None and self._best[0] == self.steps_done
        due = self.steps_done % self.config.checkpoint.every_steps == 0
        due |= self.steps_done == self.schedule.total_steps or self.ports.stop()
        if due or (best and self.config.checkpoint.keep_best):
            self._write_checkpoint(best)

    @verb
    def export(self) -> None:
        """The HF folder, at the end of the run and every n steps if asked."""
        every, folder = self.config.checkpoint.export_hf_every_steps, self.config.export_folder
        if self.finished:
            self.ports.policy.export_hf(folder)
        elif every and self.steps_done % every == 0 and not self.ports.stop():
            self.ports.policy.export_hf(folder.with_name(f"{folder.name}_step_{self.steps_done:06d}"))

    @property
    def finished(self) -> bool:
        """All steps are done, and the evaluation after them."""
        return self.steps_done == self.schedule.total_steps and self._samples_due() == 0

    def result(self) -> LoopResult:
        verbs = {name: spent_s for name, spent_s in self._seconds.items() if name not in ("step", "other")}
        return LoopResult(
            steps=self.steps_done,
            finished=self.finished,
            before=self._before,
            after=self._after,
            best_step=None if self._best is None else self._best[0],
            wall_s=self._seconds.get("step", 0.0),
            other_s=self._seconds.get("other", 0.0),
            seconds=verbs,
            skipped_updates=self.guard.total,
        )

    def resume(self) -> None:
        """Go on from the newest checkpoint, when there is one."""
        newest = self.ports.keeper.newest_intact()
        if newest is None:
            return
        self.restore(self.ports.policy.load(newest))
        check_steps(self.steps_done, self.schedule.total_steps)
        self._saved_at = self.steps_done
        self.ports.observer.resumed(self.steps_done)

    def state(self) -> dict[str, Any]:
        """Everything of the loop that a checkpoint needs, JSON-able. The stage follows from ``steps_done``."""
        before, after = self._before, self._after
        return {
            "steps_done": self.steps_done,
            "controller": self.controller.state(),
            "clip_high": self.clip_high.state(),
            "ledger": self.ledger.state(),
            "guard": self.guard.state(),
            "alarms": self.alarms.state(),
            "stream": self.ports.stream.state(),
            "before": None if before is None else asdict(before),
            "after": None if after is None else asdict(after),
            "evaluated_at": self._evaluated_at,
            "best": None if self._best is None else list(self._best),
            "seconds": dict(self._seconds),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self.steps_done = state["steps_done"]
        self.controller.restore(state["controller"])
        self.clip_high.restore(state.get("clip_high", self.clip_high.state()))
        self.ledger.restore(state["ledger"])
        self.guard.restore(state["guard"])
        self.alarms.restore(state["alarms"])
        self.ports.stream.restore(state["stream"])
        self._before = None if state["before"] is None else EvaluationResult(**state["before"])
        self._after = None if state["after"] is None else EvaluationResult(**state["after"])
        self._evaluated_at = state["evaluated_at"]
        self._best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self._seconds = dict(state["seconds"])

    def _look_for_alarms(self, step: Step, metrics: Mapping[str, float]) -> dict[str, float]:
        """Tell the alarms that begin with this step; returns ``alarm/...``."""
        first = sum(stage.steps for stage in self.config.stages[: step.stage_index])
        seen = StepSeen(self.steps_done, step.stage_index, self.steps_done - first, step.stage, metrics)
        told, found = self.alarms.look(seen)
        for text in told:
            self._alarm(text)
        return found

    def _alarm(self, text: str) -> None:
        logger.info("%s", text)  # not a warning: the observer shows it
        self.ports.observer.alarmed(text)

    def _samples_due(self) -> int:
        """k of the evaluation that the weights after ``steps_done`` still lack; 0: none."""
        config = self.config.evaluation
        if self.ports.evaluator is None or self._evaluated_at == self.steps_done:
            return 0
        if self.steps_done in (0, self.schedule.total_steps):
            return config.samples
        return config.samples_during if config.every_steps and self.steps_done % config.every_steps == 0 else 0

    def _lap(self, busy: Sequence[RolloutReport | EvaluationResult | UpdateReport]) -> dict[str, float]:
        """The time metrics since the last row, added to the run's totals."""
        times = time_metrics(*self.ports.timer.lap(), busy)
        for name, spent_s in times.items():
            if name.startswith("time/"):
                name = name.removeprefix("time/")
                self._seconds[name] = self._seconds.get(name, 0.0) + spent_s
        return times

    def _write_checkpoint(self, best: bool) -> None:
        """The snapshot, which is of ``steps_done``; weights that are saved already are not saved again."""
        if self._saved_at != self.steps_done:
            self._finish_save(wait=True)
            self.ports.policy.save(self.ports.keeper.folder_for(self.steps_done), self._snapshot)
            self._saved_at = self.steps_done
            self._saving = (self.steps_done, best)
        elif best:
            self._finish_save(wait=True)
            self.ports.keeper.saved(self.steps_done, best)

    def _finish_save(self, wait: bool) -> None:
        """When the checkpoint that is being written is complete, tell the keeper: it may now drop older ones."""
        if self._saving is not None and (write_s := self.ports.policy.finish_save(wait)) is not None:
            self._write_s = write_s
            self.ports.keeper.saved(*self._saving)
            self._saving = None
