"""The training loop as a list of verbs (``Loop.train_step``).

``steps_done`` counts finished rollout steps over all stages, and is at the same time the version of the weights: step
k + 1 samples from version k and ends by handing version k + 1 to the engines. That holds for a step without any SGD
step too (every group rejected): the handoff is made all the same, so that version, step and checkpoint never part.

Stopping: up to the first SGD step a step can be abandoned, since nothing but the stream and the ledger has moved; the
state saved is then the one before the step, and the resumed run repeats it with the same seed. From the first SGD step
on the step is finished, but its handoff and its evaluation are left to the resumed run.

Staleness (``max_staleness`` 1): step k + 1 is sampled while step k trains, all of it from version k, and decoded before
version k + 1 is handed over, so that a response never mixes versions and is one behind the policy that it trains. The
first step of a stage, and the first after a resume, is sampled from the policy itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from or1_megatron.config.schema import StageConfig
from or1_megatron.interfaces import EnginesLost, Stopped
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.alarms import Alarms, StepSeen
from or1_megatron.rl.batch import make_batches
from or1_megatron.rl.checks import check_prompts, check_rejected, check_state, check_verdicts, check_versions
from or1_megatron.rl.entropy import ClipHighController, EntropyController, EntropyReading, estimate
from or1_megatron.rl.evaluations import Due, Evaluations
from or1_megatron.rl.loss import make_objective
from or1_megatron.rl.metrics import (
    Filtered,
    StepRecord,
    evaluation_metrics,
    measured_mismatch,
    step_metrics,
    time_metrics,
)
from or1_megatron.rl.ports import LoopConfig, LoopResult, Ports
from or1_megatron.rl.safety import SgdStep, UpdateGuard
from or1_megatron.rl.saving import Saving
from or1_megatron.rl.score import Scored, first_scores, score
from or1_megatron.rl.stages import PassRateLedger, StageSchedule
from or1_megatron.rl.supply import Supply
from or1_megatron.rl.verbs import stopping_verb, unless_stopping, verb
from or1_megatron.types import (
    AdvantagedGroup,
    Batch,
    EvaluationResult,
    Group,
    HandoffReport,
    Prompt,
    RolloutReport,
    Sample,
    UpdateReport,
)

logger = logging.getLogger(__name__)


class Loop:
    """MAGIC (RECIPE): see ``train_step``."""

    def __init__(self, config: LoopConfig, ports: Ports) -> None:
        self.config = config
        self.ports = ports
        self.schedule = StageSchedule(config.stages, config.stage_count)
        self.evaluations = Evaluations(config.evaluation, self.schedule)
        self.supply = Supply(ports.stream, ports.rollouts, config.algorithm.advantage, config.seed)
        self.controller = EntropyController(config.algorithm.entropy)
        self.clip_high = ClipHighController(config.algorithm.loss, config.algorithm.entropy.target)
        self.ledger = PassRateLedger()
        self.guard = UpdateGuard(config.safety, ports.policy, ports.dumps, self._alarm)
        self.alarms = Alarms(config.safety, config.dtype)
        self.saving = Saving(ports.policy, ports.keeper)
        self.steps_done = 0
        self._rejected_in_a_row = 0  # rollout steps without a kept group
        self._staleness = 0  # of the present step's oldest token, in versions
        self._ahead: RolloutReport | None = None  # of the roll-out that this step made for the next
        self._seconds: dict[str, float] = {}  # per verb, with "step" and "other"

    def run(self) -> LoopResult:
        """Train to the end of the schedule, or until asked to stop; from the newest checkpoint when there is one."""
        try:
            self.start()
            while not self.schedule.over(self.steps_done):
                self.train_step()
        except Stopped:
            logger.warning(
                "stopped within step %d: going back to the state after %d", self.steps_done + 1, self.steps_done
            )
            self.saving.write(self.steps_done, best=False)
        with self.ports.timer("save"):
            self.saving.finish(wait=True)
        self._lap([])  # the last save and export belong to no row, but to the run
        return self.result()

    def train_step(self) -> None:
        """One rollout step: the recipe, a verb a line."""
        filtered = self.begin_stage()
        index, stage = self.schedule.current, self.schedule.at(self.steps_done)
        prompts = self.take_problems(stage)
        self.roll_out(prompts, stage)
        groups, rollout = self.verify()
        self.sample_ahead(stage)
        self.observe(index, groups)
        advantaged = self.assign_advantages(groups)
        kept, rejected = self.reject(advantaged)
        scored = self.score(kept, rejected, stage)
        reading = self.read_entropy(groups, kept, scored)
        batches = self.batch(scored.samples, stage)
        updates = self.update(batches, stage, reading)
        self.control_entropy(reading)
        self.finish_ahead()
        self.steps_done += 1  # the policy is a new one now; what follows speaks of it
        handoff = self.hand_off()
        evaluation = self.evaluate()
        mismatch = scored.mismatch if scored.mismatch or self._staleness else measured_mismatch(updates)
        step = StepRecord(
            index, stage, filtered, groups, kept, rejected, rollout, reading, mismatch, batches, updates, handoff
        )
        step = replace(step, staleness=self._staleness, scores=first_scores(scored, updates))
        metrics = self.measure(step, evaluation)
        if self._evaluation_due() == "whole":  # the run ends here on a plateau, which could not be known before
            evaluation = self.evaluate() or evaluation
        self.report(step, metrics, evaluation)
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
        self.saving.snapshot = self.state()
        if self.hand_off() is None:
            raise Stopped("hand_off")
        evaluation = self.evaluate()
        times = self._lap([] if evaluation is None else [evaluation])
        if evaluation is not None:
            is_first = self.steps_done == self.evaluations.first_step
            metrics = evaluation_metrics(evaluation)
            self.ports.tracker.log(self.steps_done, {**metrics, **(times if is_first else {})})
            if not is_first:
                self.schedule.read(metrics)
                self.save()
                self.export()
        self.saving.snapshot = self.state()

    @stopping_verb
    def begin_stage(self) -> Filtered | None:
        """At a stage's start: its mixture, its filters (RECIPE section 3; the first has none), what it begins afresh.

        Raises NoPromptsLeft when the filters leave fewer prompts than a step takes.
        """
        if not self.schedule.begins(self.steps_done):
            return None
        index, stage = self.schedule.enter(self.steps_done)
        self.evaluations.stage_begins(index)
        self._rejected_in_a_row = 0
        if self.config.mixtures:
            self.ports.stream.mix(self.config.mixtures[index])
        if stage.restart_optimizer and self.steps_done > 0:
            self.ports.policy.restart_optimizer()
        if stage.restart_controller:
            algorithm = self.config.algorithm
            self.controller = EntropyController(algorithm.entropy)
            self.clip_high = ClipHighController(algorithm.loss, algorithm.entropy.target)
        if index == 0:
            return None
        solved = self.ledger.solved(index - 1) if stage.filter_solved else frozenset()
        outside = self.ledger.outside(index - 1, stage.min_pass_rate, stage.max_pass_rate) - solved
        if not stage.filter_solved and not outside:
            return None
        left = self.ports.stream.exclude(solved | outside)
        check_prompts(stage, len(solved | outside), left)
        return Filtered(len(solved), len(outside), left)

    @stopping_verb
    def take_problems(self, stage: StageConfig) -> list[Prompt]:
        """D_R prompts, and those that a refill may need; none when the step has been sampled ahead."""
        return [] if self.supply.has_ahead else self.supply.take(stage)

    @stopping_verb
    def roll_out(self, prompts: Sequence[Prompt], stage: StageConfig) -> None:
        """Sample gs responses to each prompt; back when the last one is decoded."""
        if not self.supply.has_ahead:
            self.supply.ask(prompts, stage, self.steps_done)
            self.ports.rollouts.wait_decoded()

    @stopping_verb
    def verify(self) -> tuple[list[Group], RolloutReport]:
        """Wait for the verdicts that are still out. Raises VerificationFailing and StaleRollout."""
        groups, report = self.supply.collect()
        check_verdicts(groups, self.config.max_error_fraction)
        self._staleness = check_versions(groups, self.steps_done, self.config.max_staleness)
        return groups, report

    @stopping_verb
    def sample_ahead(self, stage: StageConfig) -> None:
        """With staleness allowed, begin with the next step, if it is sure to be of the same stage."""
        self._ahead = None
        if self.config.max_staleness and self.schedule.surely_goes_on(self.steps_done):
            self.supply.ask_ahead(stage, self.steps_done + 1)

    @verb
    def finish_ahead(self) -> None:
        """Wait until the next step is decoded, before its engines' weights go; on a stop it is given up."""
        if not self.supply.asked_ahead:
            return
        try:
            self._ahead = self.supply.finish_ahead()
        except Stopped:
            self.supply.abandon_ahead()
        except EnginesLost as error:
            unless_stopping(self, error)
            self.supply.abandon_ahead()

    @stopping_verb
    def observe(self, index: int, groups: Sequence[Group]) -> None:
        """Pass rates of all groups: before any is rejected."""
        self.ledger.record(index, groups)

    @stopping_verb
    def assign_advantages(self, groups: Sequence[Group]) -> list[AdvantagedGroup]:
        return assign_advantages(groups, self.config.algorithm.advantage)

    @stopping_verb
    def reject(self, groups: Sequence[AdvantagedGroup]) -> tuple[list[AdvantagedGroup], list[AdvantagedGroup]]:
        """(kept, rejected). Raises AllRejected after too many steps in a row of which nothing was kept."""
        kept, rejected = reject(groups, self.config.algorithm.advantage)
        self._rejected_in_a_row = 0 if kept else self._rejected_in_a_row + 1
        check_rejected(rejected, self._rejected_in_a_row, self.config.safety.max_rejected_in_a_row)
        return kept, rejected

    @stopping_verb
    def score(self, kept: Sequence[AdvantagedGroup], rejected: Sequence[AdvantagedGroup], stage: StageConfig) -> Scored:
        """The kept groups as samples, after what forward passes the step needs."""
        stale = self._staleness > 0
        return score(self.ports.policy, kept, rejected, stage, self.config.algorithm, self.config.layout, stale)

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
        objective = make_objective(self.config.algorithm, stage, reading.alpha, reading.clip_high, self._staleness > 0)
        step = self.steps_done + 1
        return [self.guard.update(SgdStep(step, i, batch, objective)) for i, batch in enumerate(batches)]

    @verb
    def control_entropy(self, reading: EntropyReading) -> None:
        """c_k -> c_{k+1}, once per rollout step; and epsilon_high's next, where it is steered."""
        self.controller.advance(reading.entropy)
        self.clip_high.advance(reading.entropy)

    @verb
    def hand_off(self) -> HandoffReport | None:
        """None on a stop: the resumed run begins with a handoff, and the engines may be gone with their node."""
        if self.ports.stop():
            return None
        try:
            return self.ports.policy.hand_off(self.steps_done)
        except EnginesLost as error:
            unless_stopping(self, error)
            return None

    @verb
    def evaluate(self) -> EvaluationResult | None:
        """avg@k of the new weights, when it is due; a stop leaves it to the resumed run."""
        due = self._evaluation_due()
        if self.ports.evaluator is None or due == "no" or self.ports.stop():
            return None
        try:
            result = self.ports.evaluator.evaluate(self.evaluations.settings(self.steps_done), due == "whole")
        except Stopped:
            return None
        except EnginesLost as error:
            unless_stopping(self, error)
            return None
        self.evaluations.record(self.steps_done, result)
        self.ports.observer.evaluated(self.steps_done, result)
        return result

    @verb
    def measure(self, step: StepRecord, evaluation: EvaluationResult | None) -> dict[str, float]:
        """The step's metrics but its times and its evaluation; all of them are shown to the stage's plateau rule."""
        metrics = step_metrics(step, self.config.hardware) | {
            "sgd/skipped_in_a_row": float(self.guard.in_a_row),
            "groups/steps_rejected_in_a_row": float(self._rejected_in_a_row),
        }
        if self.config.safety.alarms:
            metrics |= self._look_for_alarms(step, metrics)
        self.schedule.read(metrics if evaluation is None else metrics | evaluation_metrics(evaluation))
        return metrics

    @verb
    def report(self, step: StepRecord, metrics: Mapping[str, float], evaluation: EvaluationResult | None) -> None:
        """Rollouts to the observer, one row of metrics to the tracker."""
        self.ports.observer.rolled_out(self.steps_done, step.stage.name, step.groups, step.kept, step.scores)
        row = dict(metrics) | self.saving.told_write_s()
        if evaluation is not None:
            row |= evaluation_metrics(evaluation)
        evaluations = [] if evaluation is None else [evaluation]
        self.ports.tracker.log(self.steps_done, row | self._lap([*self._sampled(step), *step.updates, *evaluations]))

    @verb
    def save(self) -> None:
        """Note the state that a stop goes back to; write a checkpoint of it when one is due.

        Due: every n steps, at the end, on a stop, and when the evaluation is the best so far. Returns when the state is
        copied: it is written while training goes on, and waited for before the next one and at the end of the run.
        """
        self.saving.finish(wait=False)
        self.saving.snapshot = self.state()
        best = self.evaluations.best is not None and self.evaluations.best[0] == self.steps_done
        due = self.steps_done % self.config.checkpoint.every_steps == 0
        due |= self.schedule.over(self.steps_done) or self.ports.stop()
        if due or (best and self.config.checkpoint.keep_best):
            self.saving.write(self.steps_done, best)

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
        return self.schedule.over(self.steps_done) and self._evaluation_due() == "no"

    def result(self) -> LoopResult:
        verbs = {name: spent_s for name, spent_s in self._seconds.items() if name not in ("step", "other")}
        return LoopResult(
            steps=self.steps_done,
            finished=self.finished,
            before=self.evaluations.before,
            after=self.evaluations.after,
            best_step=None if self.evaluations.best is None else self.evaluations.best[0],
            wall_s=self._seconds.get("step", 0.0),
            other_s=self._seconds.get("other", 0.0),
            seconds=verbs,
            skipped_updates=self.guard.total,
        )

    def resume(self) -> None:
        """Go on from the newest checkpoint; a run of one stage without any begins with the previous stage's."""
        newest = self.ports.keeper.newest_intact()
        if newest is not None:
            self.restore(self.ports.policy.load(newest))
            self.saving.saved_at = self.steps_done
            self.ports.observer.resumed(self.steps_done)
        elif self.config.begin is not None:
            self.restore(self.ports.policy.load(self.config.begin.checkpoint))
            self.config.begin.check(self.schedule, self.steps_done)
            self.evaluations.begin_at(self.steps_done)
            self._seconds = {}

    def state(self) -> dict[str, Any]:
        """Everything of the loop that a checkpoint needs, JSON-able."""
        return {
            "steps_done": self.steps_done,
            "schedule": self.schedule.state(),
            "controller": self.controller.state(),
            "clip_high": self.clip_high.state(),
            "ledger": self.ledger.state(),
            "guard": self.guard.state(),
            "alarms": self.alarms.state(),
            "stream": self.supply.stream_state(),
            "rejected_share": self.supply.rejected_share,
            "evaluations": self.evaluations.state(),
            "rejected_in_a_row": self._rejected_in_a_row,
            "seconds": dict(self._seconds),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        check_state(state, self.state().keys() - {"clip_high", "rejected_share"})
        self.steps_done = state["steps_done"]
        self.schedule.restore(state["schedule"], self.steps_done)
        self.controller.restore(state["controller"])
        self.clip_high.restore(state.get("clip_high", self.clip_high.state()))
        self.ledger.restore(state["ledger"])
        self.guard.restore(state["guard"])
        self.alarms.restore(state["alarms"])
        self.ports.stream.restore(state["stream"])
        self.supply.rejected_share = state.get("rejected_share", 0.0)
        self.evaluations.restore(state["evaluations"], self.steps_done)
        self._rejected_in_a_row = state["rejected_in_a_row"]
        self._seconds = dict(state["seconds"])

    def _look_for_alarms(self, step: StepRecord, metrics: Mapping[str, float]) -> dict[str, float]:
        """Tell the alarms that begin with this step; returns ``alarm/...``."""
        stage_step = self.schedule.stage_step(self.steps_done)
        seen = StepSeen(self.steps_done, step.stage_index, stage_step, step.stage, metrics)
        told, found = self.alarms.look(seen)
        for text in told:
            self._alarm(text)
        return found

    def _alarm(self, text: str) -> None:
        logger.info("%s", text)  # not a warning: the observer shows it
        self.ports.observer.alarmed(text)

    def _evaluation_due(self) -> Due:
        return "no" if self.ports.evaluator is None else self.evaluations.due(self.steps_done)

    def _sampled(self, step: StepRecord) -> list[RolloutReport]:
        """The roll-outs of this lap: a step that was sampled ahead had its own in the lap before."""
        own = [] if self._staleness else [step.rollout]
        return own if self._ahead is None else [*own, self._ahead]

    def _lap(self, busy: Sequence[RolloutReport | EvaluationResult | UpdateReport]) -> dict[str, float]:
        """The time metrics since the last row, added to the run's totals."""
        times = time_metrics(*self.ports.timer.lap(), busy, self._ahead)
        for name, spent_s in times.items():
            if name.startswith("time/"):
                name = name.removeprefix("time/")
                self._seconds[name] = self._seconds.get(name, 0.0) + spent_s
        return times
