"""The arguments of the training loop (``LoopConfig``, ``Ports``, ``Begin``) and its result (``LoopResult``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from or1_megatron.config.schema import AlgorithmConfig, CheckpointConfig, EvaluationConfig, SafetyConfig, StageConfig
from or1_megatron.interfaces import Observer, Policy, ProblemStream, Rollouts, Tracker
from or1_megatron.rl.fatal_checks import ResumeError
from or1_megatron.rl.metrics import TrainerGpus
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rl.stages import StageSchedule
from or1_megatron.runtime.timers import StepTimer
from or1_megatron.types import EvaluationResult

if TYPE_CHECKING:
    from or1_megatron.checkpoint.keeper import CheckpointKeeper
    from or1_megatron.evaluate.held_out import HeldOut


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a run of the single stage ``index`` (from 0) begins: at a checkpoint of the previous stage's run."""

    checkpoint: Path
    index: int
    chosen: bool
    """Whether the user named this checkpoint (``run.previous``). The previous stage then ends at the checkpoint."""

    def check(self, schedule: StageSchedule, steps_done: int) -> None:
        """Raise ResumeError unless the next step is the first of stage ``index``.

        ``schedule`` was restored from the checkpoint. A ``chosen`` checkpoint ends the previous stage here.
        """
        number, stages = self.index, schedule.stages  # ``number``: the previous stage, counted from 1
        if self.chosen and schedule.current == number - 1:
            schedule.end_here()
        if not schedule.over(steps_done) and schedule.index(steps_done) == number and schedule.begins(steps_done):
            return
        before, done = stages[number - 1], schedule.stage_step(steps_done)
        raise ResumeError(
            f"stage {number + 1} ('{stages[number].name}') begins where stage {number} ('{before.name}', "
            f"{before.steps} steps) has ended, but {self.checkpoint} is of step {done} of stage "
            f"'{stages[schedule.current].name}'; finish stage {number} first (or1 train ... --stage {number}), end it "
            f"there with --set stages.{number - 1}.steps={done}, or name another checkpoint with --set "
            "run.previous=..."
        )


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """The configuration sections that the loop needs, and values that are derived from other sections."""

    seed: int
    stages: tuple[StageConfig, ...]
    algorithm: AlgorithmConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    layout: BatchLayout
    max_error_fraction: float
    """Largest share of a step's verdicts that may be ``error``; above it, the run ends."""
    export_folder: Path
    """Folder of the final HF export. Earlier exports are written beside it as ``<name>_step_<step in six digits>``."""
    hardware: TrainerGpus | None = None
    safety: SafetyConfig = SafetyConfig()
    dtype: str = "float32"
    """The policy's parameter dtype, as the configuration names it."""
    stage_count: int | None = None
    """The number of stages after which the run ends; None: all stages."""
    begin: Begin | None = None
    """The checkpoint of another run from which this run begins; None: begin with the model's weights."""
    mixtures: tuple[tuple[int, ...], ...] = ()
    """For each stage, how often each source appears per epoch; empty: the stream stays as it is."""
    max_staleness: int = 0
    one_pass: bool = False
    """Whether the policy's output head is one-pass, so that it sees no whole sequences (``objectives.whole_batch``)."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The objects that the loop calls: policy, rollouts, data stream, evaluator, observer, tracker and others."""

    policy: Policy
    rollouts: Rollouts
    stream: ProblemStream
    evaluator: HeldOut | None
    """Evaluates on held-out problems; None: there are no held-out problems."""
    observer: Observer
    tracker: Tracker
    keeper: CheckpointKeeper
    timer: StepTimer
    stop: Callable[[], bool]
    """Returns True once the run has been asked to stop."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The result of a run. Times are sums over all parts of a run that was stopped and resumed."""

    steps: int
    finished: bool
    """Whether all steps and evaluations are done; False: the run was stopped on request and can be resumed."""
    before: EvaluationResult | None
    after: EvaluationResult | None
    best_step: int | None
    """The step with the best evaluation after training began."""
    wall_s: float
    other_s: float
    seconds: Mapping[str, float]
    """Wall time of each verb (method of the loop, such as ``update``), by name."""
    skipped_updates: int
    """SGD steps skipped because loss or gradient was not finite."""
