"""Student's t, means with intervals, and Holm's correction for several comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

LEVEL: Final = 0.05
"""Share of true null hypotheses that may be rejected: intervals are of 95%."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with half the width of its confidence interval (NaN: too few seeds)."""

    mean: float
    half_width: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds == 0:
            return "–"
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.3f}")


def estimate(values: Iterable[float | None], level: float = LEVEL) -> Estimate:
    """Return the mean of the values that are not None, with its interval of 1 - ``level`` by Student's t."""
    found = [value for value in values if value is not None]
    if len(found) < 2:
        return Estimate(found[0] if found else math.nan, math.nan, len(found))
    width = quantile(level, len(found) - 1) * stdev(found) / math.sqrt(len(found))
    return Estimate(fmean(found), width, len(found))


def p_value(values: Sequence[float], null: float) -> float:
    """Return the two-sided p-value of Student's t-test that the mean of two or more values is ``null``."""
    distance, spread = abs(fmean(values) - null), stdev(values)
    if spread == 0:
        return 0.0 if distance > 0 else 1.0
    return tail(distance * math.sqrt(len(values)) / spread, len(values) - 1)


def tail(t: float, freedom: int) -> float:
    """Return the probability that |t| is exceeded at so many degrees of freedom."""
    return 1.0 - _within(math.atan(t / math.sqrt(freedom)), freedom)


def quantile(level: float, freedom: int) -> float:
    """Return the t that |t| exceeds with probability ``level`` at so many degrees of freedom, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1.0 - _within(middle, freedom) > level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[float]:
    """Return the level at which each of the hypotheses is tested (Holm 1979), in their order.

    From the smallest p on, of m hypotheses, the levels are level / m, level / (m - 1), ...; after the first that is not
    rejected the level stays. So a hypothesis is rejected if and only if its p is at most its level, and the probability
    of rejecting any true one is at most ``level``. Worked example: p of 0.03, 0.005, 0.04 at 0.05 have levels 0.025,
    0.0167, 0.025: only the second is rejected.
    """
    levels = [0.0] * len(p_values)
    left, current, stopped = len(p_values), 0.0, False
    for place in sorted(range(len(p_values)), key=p_values.__getitem__):
        if not stopped:
            current = level / left
            left -= 1
            stopped = p_values[place] > current
        levels[place] = current
    return levels


def _within(angle: float, freedom: int) -> float:
    """Return the probability of |t| < sqrt(freedom) * tan(angle) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series
