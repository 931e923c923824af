"""The loop's arguments and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from or1_megatron.config.schema import AlgorithmConfig, CheckpointConfig, EvaluationConfig, SafetyConfig, StageConfig
from or1_megatron.interfaces import Evaluator, Observer, Policy, ProblemStream, Rollouts, Tracker
from or1_megatron.rl.metrics import TrainerGpus
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rl.stages import StageSchedule, check_previous
from or1_megatron.runtime.timers import StepTimer
from or1_megatron.types import EvaluationResult

if TYPE_CHECKING:
    from or1_megatron.checkpoint.keeper import CheckpointKeeper


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of a run of stage ``index`` (from 0): a checkpoint of the previous stage's run."""

    checkpoint: Path
    index: int
    chosen: bool
    """The user named this checkpoint (run.previous): the previous stage counts as ended there."""

    def check(self, schedule: StageSchedule, steps_done: int) -> None:
        """Let the schedule, restored from the checkpoint, begin stage ``index``. Raises ResumeError when it cannot."""
        if self.chosen and schedule.current == self.index - 1:
            schedule.end_here()
        check_previous(schedule, self.index, steps_done, self.checkpoint)


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """The configuration sections that the loop needs, and values derived from other sections."""

    seed: int
    stages: tuple[StageConfig, ...]
    algorithm: AlgorithmConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    layout: BatchLayout
    max_error_fraction: float
    """A step with a larger share of verdicts ``error`` ends the run."""
    export_folder: Path
    """Folder of the final HF export; an export after step 20 is written beside it, as ``<name>_step_000020``."""
    hardware: TrainerGpus | None = None
    safety: SafetyConfig = SafetyConfig()
    dtype: str = "float32"
    """The policy's parameter dtype, as the configuration names it."""
    stage_count: int | None = None
    """The run ends after this many stages; None: all."""
    begin: Begin | None = None
    """None: start with the model's weights."""
    mixtures: tuple[tuple[int, ...], ...] = ()
    """For each stage, how often each source appears per epoch; empty: the stream stays as it is."""
    max_staleness: int = 0
    one_pass: bool = False
    """The policy's head is one-pass: it has no whole sequences (``objectives.scored.needs_scores``)."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything that the loop calls."""

    policy: Policy
    rollouts: Rollouts
    stream: ProblemStream
    evaluator: Evaluator | None
    """None: there are no held-out problems."""
    observer: Observer
    tracker: Tracker
    keeper: CheckpointKeeper
    timer: StepTimer
    stop: Callable[[], bool]
    """True once the run has been asked to stop."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The result of a run. Times are sums over all its resumed parts."""

    steps: int
    finished: bool
    """All steps and evaluations are done; False: stopped on request, to be resumed."""
    before: EvaluationResult | None
    after: EvaluationResult | None
    best_step: int | None
    """The step with the best evaluation after training began."""
    wall_s: float
    other_s: float
    seconds: Mapping[str, float]
    """Per verb."""
    skipped_updates: int
    """SGD steps skipped because loss or gradient was not finite."""
