"""The rule of ``PlateauConfig``: when a stage has converged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from or1_megatron.config.schema import PlateauConfig


class Plateau:
    """Blocks of ``window`` values; a block is flat if its mean is at most ``gain`` above the best earlier mean.

    Worked example (window 2, gain 0.1, patience 1): values 0.1, 0.3 | 0.5, 0.5 | 0.5, 0.7 | 0.7, 0.6: means 0.2, 0.5,
    0.6, 0.65. 0.5 is 0.3 above 0.2: progress. 0.6 is 0.1 above 0.5, not more: flat, and the stage ends here. With
    patience 2 the fourth is compared with 0.6, the best so far: 0.05 above, flat again, and the stage ends.
    """

    def __init__(self, config: PlateauConfig) -> None:
        self._config = config
        self._block: list[float] = []
        self._best: float | None = None
        self._flat = 0

    def read(self, metrics: Mapping[str, float]) -> None:
        """Take the metric's value, if the row has it."""
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
        """Whether the stage ends after ``stage_steps`` of its steps."""
        return self._flat >= self._config.patience and stage_steps >= self._config.min_steps

    def may_be_reached(self, stage_steps: int) -> bool:
        """Whether ``reached`` may be true once one more value has been read."""
        is_compared = self._best is not None and len(self._block) + 1 >= self._config.window
        flat = self._flat + is_compared
        return flat >= self._config.patience and stage_steps >= self._config.min_steps

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"block": list(self._block), "best": self._best, "flat": self._flat}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._block = [float(value) for value in state["block"]]
        self._best = None if state["best"] is None else float(state["best"])
        self._flat = int(state["flat"])
