"""What the sum of a step's token losses is divided by, where that is not the step's own T_k (``loss.divisor``).

Divided by its own tokens, a step of long responses counts each of them less than a step of short ones does. That does
not matter while steps are alike. Divided by a number that the steps share, a token counts the same in whichever step it
is trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

WINDOW: Final = 16
"""Rollout steps whose mean is the divisor."""


class RunningDivisor:
    """The mean T_k of the last ``WINDOW`` rollout steps before the present one; of the first step its own."""

    def __init__(self) -> None:
        self._means: deque[float] = deque(maxlen=WINDOW)

    def shares(self, token_counts: Sequence[int]) -> list[float]:
        """Return T_k over the divisor for each batch of a rollout step, and count the step.

        Worked example: steps of 100, 100 and 400 tokens, one batch each: 1, 1, 4; then one of 100: 100 / 200.
        """
        if not token_counts:
            return []
        mean = sum(token_counts) / len(token_counts)
        divisor = sum(self._means) / len(self._means) if self._means else mean
        self._means.append(mean)
        return [count / divisor for count in token_counts]

    def state(self) -> list[float]:
        """JSON-able."""
        return list(self._means)

    def restore(self, state: Sequence[Any]) -> None:
        self._means = deque(map(float, state), WINDOW)
