"""Everything that a run writes down while it goes, behind one object: metrics, rollouts, and what a resume voids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from or1_megatron.runtime.rollout_store import RolloutStore
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.runtime.trackers import JsonlTracker, TensorBoardTracker, Trackers, WandbTracker
from or1_megatron.types import AdvantagedGroup, EvaluationResult, Group, TokenScores

if TYPE_CHECKING:
    from or1_megatron.config.schema import TrackConfig
    from or1_megatron.interfaces import Observer, Tracker


class RunRecord:
    """Tracker and Observer of a run: writes to its folder, from the step on at which the run begins or resumes.

    Files are opened by the first thing to be recorded, so that ``resumed`` can clear away what came after the
    checkpoint; without ``resumed`` the run begins afresh and whatever an earlier try recorded goes.
    """

    def __init__(self, folder: RunFolder, track: TrackConfig, config: Mapping[str, Any]) -> None:
        """``config``: the run's resolved configuration, for W&B. Raises ModuleNotFoundError when W&B is asked for and
        not installed."""
        self._folder = folder
        self._track = track
        self._resumed_at = -1
        self._trackers: Trackers | None = None
        self._rollouts: RolloutStore | None = None
        self._wandb: Tracker | None = None
        if track.wandb_project is not None:  # at the door, not after the first step
            self._wandb = WandbTracker(track.wandb_project, folder.root, folder.root.name, config)

    def resumed(self, step: int) -> None:
        """Later steps than the checkpoint's are void. Raises RuntimeError when recording has begun."""
        if self._trackers is not None:
            raise RuntimeError(f"record of {self._folder.root}: resumed({step}) came after the first row")
        self._resumed_at = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's row, on disk when this returns. Raises DiskFullError naming the file."""
        trackers, _ = self._opened()
        trackers.log(step, metrics)

    def rolled_out(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        kept: Sequence[AdvantagedGroup],
        scores: TokenScores | None = None,
    ) -> None:
        """A step's rollouts, if it is one to keep; written in the background. Raises an earlier step's failure."""
        if step % self._track.rollouts_every_steps == 0:
            _, rollouts = self._opened()
            rollouts.write(step, stage, groups, kept, scores)

    def wait_written(self) -> None:
        """Block until all that was recorded so far is on disk; from any thread."""
        if self._rollouts is not None:
            self._rollouts.wait_written()

    def verb_started(self, step: int, verb: str) -> None:
        """Not recorded: the times per verb are metrics."""

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        """Not recorded here: an evaluation is part of its step's metrics."""

    def alarmed(self, text: str) -> None:
        """Not recorded here: alarms are metrics, and lines of the log."""

    def close(self) -> None:
        """Wait for the disk and close all files."""
        try:
            if self._rollouts is not None:
                self._rollouts.close()
        finally:
            if self._trackers is not None:
                self._trackers.close()
            elif self._wandb is not None:
                self._wandb.close()

    def _opened(self) -> tuple[Trackers, RolloutStore]:
        if self._trackers is None or self._rollouts is None:
            self._folder.create()
            self._folder.truncate_after(self._resumed_at)
            trackers: list[Tracker] = [JsonlTracker(self._folder.metrics)]
            if self._track.tensorboard:
                trackers.append(TensorBoardTracker(self._folder.tensorboard, first_step=self._resumed_at + 1))
            if self._wandb is not None:
                trackers.append(self._wandb)
            self._trackers = Trackers(trackers)
            self._rollouts = RolloutStore(self._folder.rollouts, self._track.rollouts_keep_bytes)
        return self._trackers, self._rollouts


class Observers:
    """Tells each of its observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def verb_started(self, step: int, verb: str) -> None:
        for observer in self._observers:
            observer.verb_started(step, verb)

    def rolled_out(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        kept: Sequence[AdvantagedGroup],
        scores: TokenScores | None = None,
    ) -> None:
        for observer in self._observers:
            observer.rolled_out(step, stage, groups, kept, scores)

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        for observer in self._observers:
            observer.evaluated(step, result)

    def alarmed(self, text: str) -> None:
        for observer in self._observers:
            observer.alarmed(text)

    def resumed(self, step: int) -> None:
        for observer in self._observers:
            observer.resumed(step)
