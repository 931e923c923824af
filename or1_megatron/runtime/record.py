"""Writes a run's metrics and rollouts to its folder and trackers; deletes records that a resumed run makes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime.host_memory import memory_metrics
from or1_megatron.runtime.jsonl import JsonlWriter, read_steps
from or1_megatron.runtime.rollout_store import HELD_OUT, RolloutStore
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.runtime.trackers import BackgroundTracker, TensorBoardTracker, check_trackers
from or1_megatron.types import AdvantagedGroup, EvaluationResult, Group, TokenScores

if TYPE_CHECKING:
    from or1_megatron.config.schema import TrackConfig
    from or1_megatron.interfaces import Observer, Tracker

    class TrackingObserver(Observer, Tracker, Protocol):
        """An observer that is also a tracker."""


class RunRecord:
    """The observer and tracker that writes metrics and rollouts to the run's folder and to the configured trackers.

    The first record opens the files, and deletes what earlier sessions recorded after the checkpoint from which the run
    resumes (``resumed``). If ``resumed`` was not called, all earlier records are deleted.
    """

    def __init__(self, folder: RunFolder, track: TrackConfig, config: Mapping[str, Any]) -> None:
        """``config``: the run's resolved configuration. Raises UserError if a configured tracker cannot be used."""
        self._folder = folder
        self._track = track
        self._resumed_at = -1
        self._files: tuple[JsonlWriter, RolloutStore, RolloutStore] | None = None
        self._held_out: list[Group] = []
        makers = check_trackers(track)  # fails here rather than after the first step
        self._others = [BackgroundTracker(name, make, folder.root, config) for name, make in makers.items()]
        self._trackers: list[Tracker] = [*self._others]

    def resumed(self, step: int) -> None:
        """Let the first record delete all records after the checkpoint's ``step``. Call this before ``log``."""
        self._resumed_at = step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, the memory in use and the counts of faults. All are on disk on return.

        Raises DiskFullError, which names the file.
        """
        metrics = {**metrics, **memory_metrics(), **FaultRecord(self._folder.root).counts()}
        self._opened()[0].write({"step": step, **{name: float(value) for name, value in metrics.items()}})
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def rolled_out(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        kept: Sequence[AdvantagedGroup],
        scores: TokenScores | None = None,
    ) -> None:
        """Write rollouts on a thread if ``rollouts_every_steps`` divides ``step``. Raises errors of earlier writes."""
        if step % self._track.rollouts_every_steps == 0:
            self._opened()[1].write(step, stage, groups, kept, scores)

    def wait_written(self) -> None:
        """Block until everything recorded so far is on disk. Any thread may call it."""
        for store in self._files[1:] if self._files is not None else ():
            store.wait_written()

    def verb_started(self, step: int, verb: str) -> None:
        """Do nothing: the step's metrics already have the time of each verb (method of the loop)."""

    def held_out(self, groups: Sequence[Group]) -> None:
        """Keep the responses to a held-out set until ``evaluated`` writes them."""
        self._held_out += groups

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        """Write the held-out responses in the background, marked as not kept."""
        self._opened()[2].write(step, HELD_OUT, self._held_out, [])
        self._held_out = []

    def alarmed(self, step: int, text: str) -> None:
        """Write an alarm's step and text."""
        self._opened()
        alarms = JsonlWriter(self._folder.alarms, "alarms")
        alarms.write({"step": step, "text": text})
        alarms.close()

    def close(self) -> None:
        """Wait until all is on disk; close all files and trackers, and only then raise an error of one of them."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
            for file in self._files or ():
                stack.callback(file.close)

    def _opened(self) -> tuple[JsonlWriter, RolloutStore, RolloutStore]:
        if self._files is None:
            self._folder.create()
            self._folder.truncate_after(self._resumed_at)
            for tracker in self._others if self._folder.metrics.exists() else ():
                tracker.fill(read_steps(self._folder.metrics))
            if self._track.tensorboard:
                self._trackers.append(TensorBoardTracker(self._folder.tensorboard, first_step=self._resumed_at + 1))
            keep, folder = self._track.rollouts_keep_bytes, self._folder
            stores = RolloutStore(folder.rollouts, keep - keep // 4), RolloutStore(folder.evaluations, keep // 4)
            self._files = JsonlWriter(folder.metrics), *stores
        return self._files


def _passed_on(name: str) -> Any:
    """Return a method that calls the method ``name`` of each observer."""

    def call(self: Observers, *args: Any, **more: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*args, **more)

    return call


class Observers:
    """An observer and tracker that passes each call on to several observers, in order. Put the most important first."""

    def __init__(self, observers: Sequence[TrackingObserver], says: Callable[[str], None] = lambda doing: None) -> None:
        """``says``: called at the start of each verb with a text on what the loop does."""
        self._observers = tuple(observers)
        self._says = says

    log, rolled_out, evaluated = _passed_on("log"), _passed_on("rolled_out"), _passed_on("evaluated")
    alarmed, resumed = _passed_on("alarmed"), _passed_on("resumed")

    def close(self) -> None:
        """Close all observers. An error is raised once all are closed."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(observer.close)

    def verb_started(self, step: int, verb: str) -> None:
        self._says(f"{verb} after step {step}")
        for observer in self._observers:
            observer.verb_started(step, verb)
