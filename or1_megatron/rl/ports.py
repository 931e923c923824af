"""What the loop is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from or1_megatron.config import AlgorithmConfig, CheckpointConfig, EvaluationConfig, SafetyConfig, StageConfig
from or1_megatron.interfaces import (
    CheckpointKeeper,
    Evaluator,
    Observer,
    Policy,
    ProblemStream,
    Rollouts,
    Tracker,
    VerbTimer,
)
from or1_megatron.rl.batch import BatchLayout
from or1_megatron.rl.dump import DumpStore
from or1_megatron.rl.metrics import Hardware
from or1_megatron.types import EvaluationResult


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """The sections that the loop needs, and what follows from others."""

    seed: int
    stages: tuple[StageConfig, ...]
    algorithm: AlgorithmConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    layout: BatchLayout
    max_error_fraction: float
    """A step with a larger share of verdicts ``error`` ends the run."""
    export_folder: Path
    """Of the final HF export; an export after step 20 on the way lies beside it, as ``<name>_step_000020``."""
    hardware: Hardware | None = None
    safety: SafetyConfig = SafetyConfig()
    dtype: str = "float32"
    """Of the policy's parameters, as the configuration names it."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything that the loop acts through."""

    policy: Policy
    rollouts: Rollouts
    stream: ProblemStream
    evaluator: Evaluator | None
    """None: nothing is held out, nothing is evaluated."""
    observer: Observer
    tracker: Tracker
    keeper: CheckpointKeeper
    timer: VerbTimer
    stop: Callable[[], bool]
    """True once the run has been asked to stop."""
    dumps: DumpStore | None = None
    """None: batches whose loss or gradient is not finite are counted, but not kept."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What a run came to; times are summed over all its resumed parts, from the first row on."""

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
    """SGD steps left out for want of a finite loss or gradient."""
