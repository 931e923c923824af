"""Which stage a step belongs to, and which problems a stage has already solved (RECIPE section 3).

Steps are counted over all stages: step k is the state after k rollout steps, so the next one belongs to ``at(k)``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from or1_megatron.config import StageConfig
from or1_megatron.types import Group


class StageSchedule:
    """Stages of 3 and 2 steps: steps_done 0, 1, 2 are in stage 0; 3, 4 in stage 1; at 5 the run is over."""

    def __init__(self, stages: Sequence[StageConfig]) -> None:
        self.stages = tuple(stages)
        self._ends = list(accumulate(stage.steps for stage in self.stages))

    @property
    def total_steps(self) -> int:
        return self._ends[-1]

    def index(self, steps_done: int) -> int:
        """The stage (from 0) of the next step after ``steps_done``. ValueError outside [0, total_steps)."""
        if not 0 <= steps_done < self.total_steps:
            raise ValueError(f"step {steps_done} is outside the schedule of {self.total_steps} steps")
        return bisect_right(self._ends, steps_done)

    def at(self, steps_done: int) -> StageConfig:
        return self.stages[self.index(steps_done)]

    def begins(self, steps_done: int) -> bool:
        """Whether the next step is the first of its stage."""
        return steps_done == 0 or steps_done in self._ends[:-1]


class PassRateLedger:
    """How many of its samples each problem had right, by stage, over all its occurrences in that stage.

    Recorded before rejection: a group that was all right is rejected, and it is the very one the filter looks for.
    """

    def __init__(self) -> None:
        self._stages: dict[int, dict[str, tuple[int, int]]] = {}

    def record(self, stage: int, groups: Sequence[Group]) -> None:
        """Add each group's (right, samples) to its problem's."""
        rates = self._stages.setdefault(stage, {})
        for group in groups:
            rewards = group.rewards
            right, samples = rates.get(group.prompt.problem.id, (0, 0))
            rates[group.prompt.problem.id] = (right + int((rewards > 0).sum()), samples + rewards.size)

    def solved(self, stage: int) -> frozenset[str]:
        """Problems whose every sample in ``stage`` was right."""
        return frozenset(
            problem for problem, (right, samples) in self._stages.get(stage, {}).items() if right == samples
        )

    def state(self) -> dict[str, Any]:
        """JSON-able: {stage: {problem id: [right, samples]}}, a copy."""
        return {str(stage): {p: list(rate) for p, rate in rates.items()} for stage, rates in self._stages.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stages = {
            int(stage): {problem: (int(right), int(samples)) for problem, (right, samples) in rates.items()}
            for stage, rates in state.items()
        }
