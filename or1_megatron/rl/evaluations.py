"""Decides when a run evaluates held-out problems, and keeps the first, the last and the best result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from or1_megatron.config.schema import EvaluationConfig, StageConfig
from or1_megatron.rl.stages import StageSchedule
from or1_megatron.types import EvaluationResult

Due = Literal["no", "during", "whole"]
"""Which evaluation is due. ``whole``: before or after training, with ``samples`` responses per problem. ``during``:
while the run trains, with ``samples_during`` responses per problem."""


class Evaluations:
    """The held-out results of a run: before training, after training, and the best since training began."""

    def __init__(self, config: EvaluationConfig, schedule: StageSchedule) -> None:
        self._config, self._schedule = config, schedule
        self.first_step = 0
        """Steps done when the run began. It is above 0 for a run of a later stage."""
        self.before: EvaluationResult | None = None
        self.after: EvaluationResult | None = None
        self.best: tuple[int, float] | None = None
        """(step, accuracy) of the best evaluation after training began."""
        self._done_at: int | None = None

    def due(self, steps_done: int) -> Due:
        """Return which evaluation of the weights after ``steps_done`` steps is due."""
        if self._schedule.over(steps_done):
            return "whole" if self.after is None else "no"
        if self._done_at == steps_done:
            return "no"
        if steps_done == self.first_step:
            return "whole"
        every = self.settings(steps_done).every_steps
        return "during" if every and steps_done % every == 0 else "no"

    def settings(self, steps_done: int) -> EvaluationConfig:
        """Return the settings of the stage that trained the weights after ``steps_done`` steps.

        Before training, return the settings of the run's first stage.
        """
        return self._config.in_stage(self._stage(steps_done))

    def record(self, steps_done: int, result: EvaluationResult) -> None:
        self._done_at = steps_done
        if steps_done == self.first_step:
            self.before = result
        elif self.best is None or result.accuracy > self.best[1]:
            self.best = (steps_done, result.accuracy)
        if self._schedule.over(steps_done):
            self.after = result

    def stage_begins(self, index: int) -> None:
        """Forget the best result when stage ``index`` has other evaluation settings than the stage before."""
        stages = self._schedule.stages
        if index and stages[index].evaluate != stages[index - 1].evaluate:
            self.best = None

    def begin_at(self, step: int) -> None:
        """Start a new run after ``step``, without the results of the previous run."""
        self.first_step = step
        self.before = self.after = self.best = self._done_at = None

    def state(self) -> dict[str, Any]:
        """Return the results for a checkpoint, JSON-able."""
        before, after = self.before, self.after
        return {
            "first_step": self.first_step,
            "before": None if before is None else asdict(before),
            "after": None if after is None else asdict(after),
            "best": None if self.best is None else list(self.best),
            "done_at": self._done_at,
        }

    def restore(self, state: Mapping[str, Any], steps_done: int) -> None:
        """Take over what ``state()`` returned. If the run now has more steps, forget the result after training."""
        self.first_step, self._done_at = state["first_step"], state["done_at"]
        self.before, self.after = _result(state["before"]), _result(state["after"])
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        if not self._schedule.over(steps_done):
            self.after = None

    def _stage(self, steps_done: int) -> StageConfig:
        if steps_done == self.first_step and not self._schedule.over(steps_done):
            return self._schedule.at(steps_done)
        return self._schedule.stages[self._schedule.current]


def _result(state: Mapping[str, Any] | None) -> EvaluationResult | None:
    if state is None:
        return None
    sets = {name: EvaluationResult(**result) for name, result in state["sets"].items()}
    return EvaluationResult(**{**state, "sets": sets})
