"""What an ablation's runs came to: means over seeds with intervals, and whether the claim's comparisons held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final, Literal

from or1_megatron.ablate.ablation import Expectation

STUDENT_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantile 0.975 of Student's t with 1, 2, ... degrees of freedom; beyond them 1.96 is near enough."""

Rows = Sequence[Mapping[str, Any]]
Window = Literal["early", "late", "all", "last"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with half the width of its 95% confidence interval (NaN: too few seeds for one)."""

    mean: float
    half_width: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds == 0:
            return "–"
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.3f}")


@dataclass(frozen=True, slots=True)
class Seen:
    """One comparison: the paired difference over seeds, and what it says of the claim."""

    expectation: Expectation
    difference: Estimate
    verdict: Literal["as claimed", "the opposite", "not resolved", "not run"]


def value_over(rows: Rows, metric: str, window: Window) -> float | None:
    """The metric's mean over the window of the rows that have it, or its last value; None when none has."""
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    if not values:
        return None
    quarter = max(1, len(values) // 4)
    chosen = {"early": values[:quarter], "late": values[-quarter:], "all": values, "last": values[-1:]}[window]
    return fmean(chosen)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95% interval by Student's t, the seeds being independent."""
    if not values:
        return Estimate(math.nan, math.nan, 0)
    if len(values) == 1:
        return Estimate(values[0], math.nan, 1)
    freedom = len(values) - 1
    quantile = STUDENT_T_975[freedom - 1] if freedom <= len(STUDENT_T_975) else 1.96
    return Estimate(fmean(values), quantile * stdev(values) / math.sqrt(len(values)), len(values))


def look(expectation: Expectation, higher: Mapping[int, Rows], lower: Mapping[int, Rows]) -> Seen:
    """Compare two arms, seed by seed: of one seed they start from the same weights and draw the same problems."""
    pairs = []
    for seed in sorted(higher.keys() & lower.keys()):
        a = value_over(higher[seed], expectation.metric, expectation.window)
        b = value_over(lower[seed], expectation.metric, expectation.window)
        if a is not None and b is not None:
            pairs.append(a - b)
    difference = estimate(pairs)
    if len(pairs) < 2:
        return Seen(expectation, difference, "not run")
    if difference.mean - difference.half_width > 0:
        return Seen(expectation, difference, "as claimed")
    if difference.mean + difference.half_width < 0:
        return Seen(expectation, difference, "the opposite")
    return Seen(expectation, difference, "not resolved")


def mean_curve(runs: Sequence[Rows], metric: str) -> list[tuple[float, float, float, float]]:
    """(step, mean, lowest, highest) over the seeds that have the metric at that step."""
    by_step: dict[int, list[float]] = {}
    for rows in runs:
        for row in rows:
            if row.get(metric) is not None:
                by_step.setdefault(int(row["step"]), []).append(float(row[metric]))
    return [(float(step), fmean(found), min(found), max(found)) for step, found in sorted(by_step.items())]
