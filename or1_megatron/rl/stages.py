"""The schedule of training stages, the plateau rule that ends a stage early, and each problem's pass rate per stage.

Steps are counted over all stages (RECIPE section 3). After k finished steps the next step belongs to stage ``at(k)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from or1_megatron.config.schema import PlateauConfig, StageConfig
from or1_megatron.rl.fatal_checks import check_stage_over, check_stage_steps
from or1_megatron.types import Group


class Plateau:
    """The rule of ``PlateauConfig``: a stage has converged when ``patience`` successive blocks of a metric are flat.

    A block is ``window`` values. It is flat if its mean is at most ``gain`` above the best mean of an earlier block.

    Worked example (window 2, gain 0.1, patience 1): values 0.1, 0.3 | 0.5, 0.5 | 0.5, 0.7 | 0.7, 0.6 have the block
    means 0.2, 0.5, 0.6, 0.65. 0.5 is 0.3 above 0.2, which is progress. 0.6 is only 0.1 above 0.5, so the block is flat
    and the stage ends. With patience 2 the stage goes on; 0.65 is 0.05 above the best mean 0.6, so this block is flat
    too, and the stage ends.
    """

    def __init__(self, config: PlateauConfig) -> None:
        self._config = config
        self._block: list[float] = []
        self._best: float | None = None
        self._flat = 0

    def read(self, metrics: Mapping[str, float]) -> None:
        """Add the value of the rule's metric to the present block, if ``metrics`` has the metric."""
        value = metrics.get(self._config.metric)
        if value is None:
            return
        self._block.append(float(value))
        if len(self._block) < self._config.window:
            return
        mean = math.fsum(self._block) / len(self._block)
        self._block = []
        progress = self._best is None or mean > self._best + self._config.gain
        self._flat = 0 if progress else self._flat + 1
        self._best = mean if self._best is None else max(self._best, mean)

    def reached(self, stage_steps: int) -> bool:
        """Return whether the stage ends now, after ``stage_steps`` of its steps."""
        return self._flat >= self._config.patience and stage_steps >= self._config.min_steps

    def may_be_reached(self, stage_steps: int) -> bool:
        """Return whether ``reached`` may be true once one more value has been read."""
        is_compared = self._best is not None and len(self._block) + 1 >= self._config.window
        flat = self._flat + is_compared
        return flat >= self._config.patience and stage_steps >= self._config.min_steps

    def state(self) -> dict[str, Any]:
        """Return the unfinished block, the best mean and the number of flat blocks, JSON-able, for a checkpoint."""
        return {"block": list(self._block), "best": self._best, "flat": self._flat}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._block = [float(value) for value in state["block"]]
        self._best = None if state["best"] is None else float(state["best"])
        self._flat = int(state["flat"])


class StageSchedule:
    """Tells which stage the next step belongs to. With stages of 3 and 2 steps, ``steps_done`` 0, 1, 2 are in stage 0
    and 3, 4 in stage 1; at 5 the run is over.

    A stage ends after its ``steps``, or earlier by its plateau rule. A resumed run may change the number of steps of
    the current stage, but not of an ended stage.
    """

    def __init__(self, stages: Sequence[StageConfig], count: int | None = None) -> None:
        """``count``: the number of stages after which the run ends; None: all stages."""
        self.stages = tuple(stages)
        self._count = len(self.stages) if count is None else count
        self._starts = [0]  # for each stage that was entered, the steps done before it
        self._ends: list[str] = []  # why each ended stage has ended: "steps", "plateau", "chosen"
        self._chosen = False
        self._plateau = self._plateau_of(0)

    @property
    def current(self) -> int:
        """Return the stage (from 0) that was entered last."""
        return len(self._starts) - 1

    @property
    def most_steps(self) -> int:
        """Return the number of steps done at the end of the run if no plateau ends a stage early."""
        return self._starts[-1] + sum(stage.steps for stage in self.stages[self.current : self._count])

    def over(self, steps_done: int) -> bool:
        return self._next(steps_done) >= self._count

    def index(self, steps_done: int) -> int:
        """Return the stage (from 0) of the next step. Raises ValueError when no step is left."""
        index = self._next(steps_done)
        if steps_done < self._starts[-1] or index >= self._count:
            raise ValueError(f"step {steps_done} is outside the schedule of {self.most_steps} steps")
        return index

    def at(self, steps_done: int) -> StageConfig:
        return self.stages[self.index(steps_done)]

    def begins(self, steps_done: int) -> bool:
        """Return whether the next step is the first of its stage."""
        return steps_done == self._starts[-1] or self.index(steps_done) > self.current

    def enter(self, steps_done: int) -> tuple[int, StageConfig]:
        """Make the next step's stage the current one; return its index and configuration."""
        index = self.index(steps_done)
        if index > self.current:
            reached = self._plateau is not None and self._plateau.reached(self.stage_step(steps_done))
            self._ends.append("chosen" if self._chosen else "plateau" if reached else "steps")
            self._starts.append(steps_done)
            self._plateau = self._plateau_of(index)
            self._chosen = False
        return index, self.stages[index]

    def stage_step(self, steps_done: int) -> int:
        """Return how many steps of the current stage are done."""
        return steps_done - self._starts[-1]

    def read(self, metrics: Mapping[str, float]) -> None:
        """Pass metrics of the last step to the current stage's plateau rule. A step's metrics may come in parts."""
        if self._plateau is not None:
            self._plateau.read(metrics)

    def surely_goes_on(self, steps_done: int, ahead: int = 1) -> bool:
        """Return whether the current stage is certain to have a step that is ``ahead`` steps after the next step.

        With a plateau rule the answer is False for ``ahead`` > 1.
        """
        done = self.stage_step(steps_done) + ahead
        may_end = self._plateau is not None and (ahead > 1 or self._plateau.may_be_reached(done))
        return done < self.stages[self.current].steps and not may_end

    def end_here(self) -> None:
        """End the current stage after the steps done so far, because the user lets the next stage start here."""
        self._chosen = True

    def state(self) -> dict[str, Any]:
        """Return where each stage began and why it ended, for a checkpoint; JSON-able."""
        plateau = None if self._plateau is None else self._plateau.state()
        return {"starts": list(self._starts), "ends": list(self._ends), "plateau": plateau}

    def restore(self, state: Mapping[str, Any], steps_done: int) -> None:
        """Take over what ``state()`` returned. Raises ResumeError when the stages' steps contradict ``steps_done``."""
        starts, ends = [int(start) for start in state["starts"]], [str(end) for end in state["ends"]]
        for stage, end, first, last in zip(self.stages, ends, starts, starts[1:], strict=False):
            check_stage_over(stage, end, last - first)
        self._starts, self._ends, self._chosen = starts, ends, False
        check_stage_steps(self.stages[self.current], self.stage_step(steps_done))
        self._plateau = self._plateau_of(self.current)
        if self._plateau is not None and state["plateau"] is not None:
            self._plateau.restore(state["plateau"])

    def _next(self, steps_done: int) -> int:
        done = self.stage_step(steps_done)
        ended = self._chosen or done >= self.stages[self.current].steps
        ended |= self._plateau is not None and self._plateau.reached(done)
        return self.current + int(ended)

    def _plateau_of(self, index: int) -> Plateau | None:
        config = self.stages[index].plateau
        return None if config is None else Plateau(config)


class PassRateLedger:
    """How many samples of each problem were right in each stage, over all occurrences of the problem.

    The loop records groups before rejection, because the filter needs the all-right groups that rejection drops.
    """

    def __init__(self) -> None:
        self._stages: dict[int, dict[str, tuple[int, int]]] = {}

    def record(self, stage: int, groups: Sequence[Group]) -> None:
        """Add each group's numbers of right samples and of all samples to the counts of its problem."""
        rates = self._stages.setdefault(stage, {})
        for group in groups:
            right, samples = rates.get(group.prompt.problem.id, (0, 0))
            rates[group.prompt.problem.id] = (right + int(group.right.sum()), samples + group.right.size)

    def solved(self, stage: int) -> frozenset[str]:
        """Return the problems whose every sample in ``stage`` was right."""
        return frozenset(
            problem for problem, (right, samples) in self._stages.get(stage, {}).items() if right == samples
        )

    def outside(self, stage: int, lowest: float, highest: float) -> frozenset[str]:
        """Return the problems whose share of right samples in ``stage`` is below ``lowest`` or above ``highest``."""
        return frozenset(
            problem
            for problem, (right, samples) in self._stages.get(stage, {}).items()
            if not lowest <= right / samples <= highest
        )

    def state(self) -> dict[str, Any]:
        """Return a JSON-able copy of the counts: {stage: {problem id: [right, samples]}}."""
        return {str(stage): {p: list(rate) for p, rate in rates.items()} for stage, rates in self._stages.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._stages = {
            int(stage): {problem: (int(right), int(samples)) for problem, (right, samples) in rates.items()}
            for stage, rates in state.items()
        }
