"""Student's t, means with intervals, and Holm's correction for several comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

import mpmath

LEVEL: Final = 0.05
"""Probability of rejecting a true null hypothesis. Intervals are therefore of 95%."""


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
    """Return the mean of the values that are not None, with its confidence interval (1 - ``level``, Student's t)."""
    measured = [value for value in values if value is not None]
    if len(measured) < 2:
        return Estimate(measured[0] if measured else math.nan, math.nan, len(measured))
    width = quantile(level, len(measured) - 1) * stdev(measured) / math.sqrt(len(measured))
    return Estimate(fmean(measured), width, len(measured))


def p_value(values: Sequence[float], null: float) -> float:
    """Return the two-sided p-value of Student's t-test that the mean of two or more values is ``null``."""
    distance, spread = abs(fmean(values) - null), stdev(values)
    if spread == 0:
        return 0.0 if distance > 0 else 1.0
    return tail(distance * math.sqrt(len(values)) / spread, len(values) - 1)


def tail(t: float, freedom: int) -> float:
    """Return the two-sided tail probability of Student's t, with ``freedom`` degrees of freedom (Abramowitz and Stegun,
    26.7.1)."""
    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


def quantile(level: float, freedom: int) -> float:
    """Return the t whose two-sided tail probability is ``level``, with ``freedom`` degrees of freedom, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        exceeded = tail(math.sqrt(freedom) * math.tan(middle), freedom)
        low, high = (middle, high) if exceeded > level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[float]:
    """Return the level at which each hypothesis is tested (Holm 1979), in the order of ``p_values``.

    The m hypotheses are sorted by p, smallest first. They get the levels level / m, level / (m - 1), ...; after the
    first hypothesis that is not rejected, the level stays the same. A hypothesis is rejected if its p is at most its
    level. The probability of rejecting any true hypothesis is then at most ``level``. Worked example: with level 0.05,
    p-values of 0.03, 0.005 and 0.04 have levels 0.025, 0.0167 and 0.025, so only the second hypothesis is rejected.
    """
    levels = [0.0] * len(p_values)
    left, current, stopped = len(p_values), 0.0, False
    for index in sorted(range(len(p_values)), key=p_values.__getitem__):
        if not stopped:
            current = level / left
            left -= 1
            stopped = p_values[index] > current
        levels[index] = current
    return levels
