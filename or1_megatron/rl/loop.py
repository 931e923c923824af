"""The training loop: the verbs of a step, what a new stage restarts, stopping, resuming, and sampling ahead.

``steps_done`` counts finished rollout steps over all stages. It is also the version of the weights: step k + 1 samples
from version k and ends by handing version k + 1 to the engines. A step without any SGD step (every group rejected)
makes its handoff too, so that version, step and checkpoint always agree.

Stopping: before its first SGD step, a step can be abandoned, because only the stream and the ledger have changed. The
state before the step is saved, and the resumed run repeats the step with the same seed. From the first SGD step on, the
step is finished, but its handoff and its evaluation are left to the resumed run.

Staleness (``max_staleness`` N): when a step begins, the rollouts of the next N steps are requested too, and a handoff
does not wait for them. A step's prompts are fixed when its rollout is requested, so they do not depend on response
lengths. No token is more than N versions behind the weights that it trains. The first step of a stage is sampled from
the current policy. A checkpoint holds the finished responses that are not yet trained on; a resumed run repeats the
requests and samples only the responses that the checkpoint lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from or1_megatron.config.schema import StageConfig
from or1_megatron.interfaces import Stopped
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.alarms import Alarms, StepSeen
from or1_megatron.rl.batch import make_batches
from or1_megatron.rl.entropy import EntropyController, EntropyReading, estimate
from or1_megatron.rl.evaluations import Due, Evaluations
from or1_megatron.rl.fatal_checks import check_rejected, check_state, check_verdicts, check_versions, frequent_reasons
from or1_megatron.rl.loop_arguments import LoopConfig, LoopResult, Ports
from or1_megatron.rl.loop_state import Saving
from or1_megatron.rl.metrics import (
    Filtered,
    StepRecord,
    evaluation_metrics,
    step_metrics,
    time_metrics,
)
from or1_megatron.rl.objectives.registry import make_objective
from or1_megatron.rl.old_log_probs import Scored, check_mismatch, first_scores, score
from or1_megatron.rl.penalties import reward_penalties
from or1_megatron.rl.skipped_steps import UpdateGuard
from or1_megatron.rl.stages import PassRateLedger, StageSchedule
from or1_megatron.rl.supply import Supply
from or1_megatron.rl.verb_decorators import deferred_verb, stopping_verb, verb
from or1_megatron.runtime.run_folder import FINISHED_RESPONSES
from or1_megatron.runtime.timeline import span
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
    """The MAGIC algorithm (RECIPE) over all stages; ``train_step`` makes one rollout step."""

    def __init__(self, config: LoopConfig, ports: Ports) -> None:
        self.config = config
        self.ports = ports
        self.schedule = StageSchedule(config.stages, config.stage_count)
        self.evaluations = Evaluations(config.evaluation, self.schedule)
        self.supply = Supply(ports.stream, ports.rollouts, config.algorithm.advantage, config.seed)
        self.controller = EntropyController(config.algorithm.entropy)
        self.ledger = PassRateLedger()
        self.guard = UpdateGuard(config.safety.max_skipped_in_a_row, ports.policy, self._alarm, config.one_pass)
        self.alarms = Alarms(config.safety, config.dtype)
        self.saving = Saving(ports.policy, ports.keeper, ports.rollouts)
        self.steps_done = 0
        self._rejected_in_a_row = 0  # rollout steps without a kept group
        self._probe_mean = 0.0  # |engine - policy| log-prob in the latest probe
        self._staleness = 0  # versions by which the current step's oldest token is behind the policy
        self._seconds: dict[str, float] = {}  # the run's wall time per verb, and of "step" and "other"

    def run(self) -> LoopResult:
        """Train until the schedule ends or a stop is requested. Resumes from the newest checkpoint, if there is one."""
        try:
            with span("step", step=0):
                self.start()
            while not self.schedule.over(self.steps_done):
                with span("step", step=self.steps_done + 1):
                    self.train_step()
        except Stopped:
            logger.warning("stopped within step %d: saving the state after %d", self.steps_done + 1, self.steps_done)
            self.saving.write(self.steps_done, best=False)
        with self.ports.timer("save"):
            self.saving.finish(wait=True)
        self._lap([])  # the last save and export are in no row of metrics, but in the run's totals
        return self.result()

    def train_step(self) -> None:
        """Make one rollout step: sample, verify, compute advantages, update, hand off, evaluate, save."""
        filtered = self.begin_stage()
        index, stage = self.schedule.current, self.schedule.at(self.steps_done)
        prompts = self.take_problems(stage)
        self.roll_out(prompts, stage)
        groups, rollout = self.verify()
        self.sample_ahead(stage)
        self.observe(index, groups)
        advantaged = self.assign_advantages(groups, stage)
        kept, rejected = self.reject(advantaged)
        scored = self.score(kept, stage)
        reading = self.read_entropy(groups, kept)
        batches = self.batch(scored.samples, stage)
        updates = self.update(batches, stage, reading)
        self.control_entropy(reading)
        self.steps_done += 1  # everything below is about the updated policy
        self.ports.rollouts.trained()
        handoff = self.hand_off()
        evaluation = self.evaluate()
        step = StepRecord(
            stage_index=index,
            stage=stage,
            filtered=filtered,
            groups=groups,
            kept=kept,
            rejected=rejected,
            rollout=rollout,
            reading=reading,
            batches=batches,
            updates=updates,
            handoff=handoff,
            staleness=self._staleness,
            scores=first_scores(scored, updates),
        )
        metrics = self.measure(step, evaluation)
        if self._evaluation_due() == "whole":  # ``measure`` found a plateau: the run ends here
            evaluation = self.evaluate() or evaluation
        self.report(step, metrics, evaluation)
        self.save()
        self.export()

    def start(self) -> None:
        """Resume, hand the weights to the engines, and make the evaluation that is due, if any.

        The metrics of step 0 are the evaluation before training. If a stop skipped the evaluation of the last step, the
        resumed run makes it and adds its result, without times, to the metrics of that step.
        """
        self.resume()
        self.ports.timer.lap()  # start-up is not the loop's time
        if self.finished:
            self.export()  # the run may have been killed between its last save and the export
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
        """Apply the data mixture, restarts and (from stage 2 on) filters of a stage that begins (RECIPE 3).

        Returns what the filters dropped; None if no stage begins or no filter applies. Raises NoPromptsLeft when the
        filters leave fewer prompts than a step takes.
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
            self.controller = EntropyController(self.config.algorithm.entropy)
        return None if index == 0 else self.supply.leave_out(self.ledger, index - 1, stage)

    @stopping_verb
    def take_problems(self, stage: StageConfig) -> list[Prompt]:
        """Take D_R prompts and the prompts that a refill may need; none if the step's rollout is already under way."""
        if self.supply.requested_steps:
            return []
        return self.supply.draw_prompts(stage)

    @stopping_verb
    def roll_out(self, prompts: Sequence[Prompt], stage: StageConfig) -> None:
        """Sample a group of responses to each prompt and wait until the last response is decoded."""
        if not self.supply.requested_steps:
            self.supply.request_rollout(prompts, stage, self.steps_done)
        self.supply.request_ahead(stage, self._sure_steps(self.supply.requested_steps))
        self.ports.rollouts.wait_decoded()

    @stopping_verb
    def verify(self) -> tuple[list[Group], RolloutReport]:
        """Wait for the remaining verdicts, and return the groups. Raises VerificationFailing and StaleRollout."""
        groups, report = self.supply.collect()
        check_verdicts(groups, self.config.max_error_fraction)
        self._staleness = check_versions(groups, self.steps_done, self.config.max_staleness)
        return groups, report

    @stopping_verb
    def sample_ahead(self, stage: StageConfig) -> None:
        """Start the next step's rollout if it had to wait for this step's refill."""
        self.supply.request_ahead(stage, self._sure_steps(self.supply.requested_steps + 1))

    def _sure_steps(self, first: int) -> list[int]:
        """Return the steps that are ``first`` to ``max_staleness`` after the current step and surely in its stage."""
        ahead = range(first, self.config.max_staleness + 1)
        return [self.steps_done + n for n in ahead if self.schedule.surely_goes_on(self.steps_done, n)]

    @stopping_verb
    def observe(self, index: int, groups: Sequence[Group]) -> None:
        """Record the pass rates of all groups, before any is rejected."""
        self.ledger.record(index, groups)

    @stopping_verb
    def assign_advantages(self, groups: Sequence[Group], stage: StageConfig) -> list[AdvantagedGroup]:
        """Subtract penalties, if there are any, from the rewards, and return each group with its advantages."""
        advantage = self.config.algorithm.advantage
        return assign_advantages(groups, advantage, reward_penalties(groups, advantage, stage.max_response_tokens))

    @stopping_verb
    def reject(self, groups: Sequence[AdvantagedGroup]) -> tuple[list[AdvantagedGroup], list[AdvantagedGroup]]:
        """Return (kept, rejected) groups. Raises AllRejected after too many steps in a row without a kept group."""
        kept, rejected = reject(groups, self.config.algorithm.advantage)
        self._rejected_in_a_row = 0 if kept else self._rejected_in_a_row + 1
        check_rejected(rejected, self._rejected_in_a_row, self.config.safety.max_rejected_in_a_row)
        return kept, rejected

    @stopping_verb
    def score(self, kept: Sequence[AdvantagedGroup], stage: StageConfig) -> Scored:
        """Return the kept groups as samples, with the log-probs that the step needs. Raises MismatchTooLarge."""
        if self.config.safety.mismatch_limit == "stop":
            limit = max(self.alarms.mismatch_mean, 3 * self._probe_mean)
            check_mismatch(self.ports.policy, kept, stage, self.config.layout, self.steps_done, limit)
        stale = self._staleness > 0
        return score(self.ports.policy, kept, stage, self.config.algorithm, self.config.layout, stale)

    @stopping_verb
    def read_entropy(self, groups: Sequence[Group], kept: Sequence[AdvantagedGroup]) -> EntropyReading:
        """Estimate the entropy e_k of the step's responses, and derive the entropy bonus's coefficient from it."""
        entropy, sampled = estimate(groups, [group.group for group in kept], self.config.algorithm.entropy)
        return EntropyReading(entropy, sampled, self.controller.alpha(entropy), self.controller.coefficient)

    @stopping_verb
    def batch(self, samples: Sequence[Sequence[Sample]], stage: StageConfig) -> list[Batch]:
        """Return a packed batch for each SGD step; [] when every group was rejected."""
        mini_batches = stage.prompts_per_step // stage.prompts_per_update
        aggregation, layout = self.config.algorithm.loss.aggregation, self.config.layout
        return make_batches(samples, mini_batches, stage.reuse, layout, aggregation, stage.max_response_tokens)

    @stopping_verb
    def update(self, batches: Sequence[Batch], stage: StageConfig, reading: EntropyReading) -> list[UpdateReport]:
        """Make the SGD steps, all with the same entropy coefficient. Raises TooManySkipped."""
        step, reports = self.steps_done + 1, []
        for i, batch in enumerate(batches):
            objective = make_objective(
                self.config.algorithm,
                stage,
                reading.alpha,
                stale=self._staleness > 0,
                seed=step * stage.sgd_steps + i,
                mean_length=batch.token_count / batch.sample_count,
            )
            reports.append(self.guard.update(step, i, batch, objective))
        return reports

    @verb
    def control_entropy(self, reading: EntropyReading) -> None:
        """Advance the entropy controller from c_k to c_{k+1}, once per rollout step."""
        self.controller.advance(reading.entropy)

    @deferred_verb
    def hand_off(self) -> HandoffReport | None:
        """Hand the weights to the engines. If the run is stopping, return None; the resumed run then hands off."""
        report = self.ports.policy.hand_off(self.steps_done)
        self._probe_mean = report.probe_mean_abs_diff or self._probe_mean  # None: no probe was due
        return report

    @deferred_verb
    def evaluate(self) -> EvaluationResult | None:
        """Measure avg@k of the new weights if an evaluation is due; else return None."""
        due = self._evaluation_due()
        if self.ports.evaluator is None or due == "no":
            return None
        result = self.ports.evaluator.evaluate(self.evaluations.settings(self.steps_done), due == "whole")
        self.evaluations.record(self.steps_done, result)
        self.ports.observer.evaluated(self.steps_done, result)
        return result

    @verb
    def measure(self, step: StepRecord, evaluation: EvaluationResult | None) -> dict[str, float]:
        """Return the step's metrics without times and evaluation; update the alarms and the stage's plateau rule."""
        metrics = step_metrics(step, self.config.hardware) | {
            "sgd/skipped_in_a_row": float(self.guard.in_a_row),
            "groups/steps_rejected_in_a_row": float(self._rejected_in_a_row),
        }
        if self.config.safety.alarms:
            stage_step = self.schedule.stage_step(self.steps_done)
            reasons = frequent_reasons(verdict for group in step.groups for verdict in group.verdicts)
            texts, raised = self.alarms.look(
                StepSeen(self.steps_done, step.stage_index, stage_step, step.stage, metrics, reasons)
            )
            for text in texts:
                self._alarm(self.steps_done, text)
            metrics |= raised
        self.schedule.read(metrics | evaluation_metrics(evaluation))
        return metrics

    @verb
    def report(self, step: StepRecord, metrics: Mapping[str, float], evaluation: EvaluationResult | None) -> None:
        """Give the rollouts to the observer, and the step's metrics to the tracker as one row."""
        self.ports.observer.rolled_out(self.steps_done, step.stage.name, step.groups, step.kept, step.scores)
        row = dict(metrics) | self.saving.take_write_s() | evaluation_metrics(evaluation)
        evaluations = [] if evaluation is None else [evaluation]
        self.ports.tracker.log(self.steps_done, row | self._lap([step.rollout, *step.updates, *evaluations]))

    @verb
    def save(self) -> None:
        """Remember the state that a stop saves, and start to write it as a checkpoint when a checkpoint is due.

        A checkpoint is due every n steps, at the end, on a stop, and after the best evaluation so far. Returns when the
        state is copied. The copy is written while training continues; the next save and the end of the run wait for it.
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
        """Write the HF folder, at the end of the run and every n steps if configured."""
        every, folder = self.config.checkpoint.export_hf_every_steps, self.config.export_folder
        if self.finished:
            self.ports.policy.export_hf(folder)
        elif every and self.steps_done % every == 0 and not self.ports.stop():
            self.ports.policy.export_hf(folder.with_name(f"{folder.name}_step_{self.steps_done:06d}"))

    @property
    def finished(self) -> bool:
        """Return whether all steps and the evaluation after the last step are done."""
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
        """Load the newest checkpoint. Without one, a run of a single stage loads the previous stage's checkpoint."""
        newest = self.ports.keeper.newest_intact()
        if newest is not None:
            self.restore(self.ports.policy.load(newest))
            if (responses := newest / FINISHED_RESPONSES).is_file() and not self.schedule.over(self.steps_done):
                # A stage's first step is never stale, even if the resume has ended the previous stage early.
                only = self.steps_done if self.schedule.begins(self.steps_done) else None
                self.ports.rollouts.restore_responses(responses.read_bytes(), only)
            self.saving.saved_at = self.steps_done
            self.ports.observer.resumed(self.steps_done)
        elif self.config.begin is not None:
            self.restore(self.ports.policy.load(self.config.begin.checkpoint))
            self.config.begin.check(self.schedule, self.steps_done)
            self.evaluations.begin_at(self.steps_done)
            self._seconds = {}

    def state(self) -> dict[str, Any]:
        """Return the loop's part of a checkpoint, JSON-able."""
        return {
            "steps_done": self.steps_done,
            "schedule": self.schedule.state(),
            "controller": self.controller.state(),
            "ledger": self.ledger.state(),
            "guard": self.guard.state(),
            "alarms": self.alarms.state(),
            **self.supply.state(),
            "evaluations": self.evaluations.state(),
            "rejected_in_a_row": self._rejected_in_a_row,
            "seconds": dict(self._seconds),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state().keys() - {"rejected_share"})
        self.steps_done = state["steps_done"]
        self.schedule.restore(state["schedule"], self.steps_done)
        self.controller.restore(state["controller"])
        self.ledger.restore(state["ledger"])
        self.guard.restore(state["guard"])
        self.alarms.restore(state["alarms"])
        self.supply.restore(state)
        self.evaluations.restore(state["evaluations"], self.steps_done)
        self._rejected_in_a_row = state["rejected_in_a_row"]
        self._seconds = dict(state["seconds"])

    def _alarm(self, step: int, text: str) -> None:
        logger.info("%s", text)  # not as a warning: the observer shows it
        self.ports.observer.alarmed(step, text)

    def _evaluation_due(self) -> Due:
        return "no" if self.ports.evaluator is None else self.evaluations.due(self.steps_done)

    def _lap(self, busy: Sequence[RolloutReport | EvaluationResult | UpdateReport]) -> dict[str, float]:
        """Return the metrics of the time since the last call (``time_metrics``), and add them to the run's totals."""
        times = time_metrics(*self.ports.timer.lap(), busy, self.config.max_staleness > 0)
        for name, spent_s in times.items():
            if name.startswith("time/"):
                name = name.removeprefix("time/")
                self._seconds[name] = self._seconds.get(name, 0.0) + spent_s
        return times
