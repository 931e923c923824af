"""The outcome of an ablation: means over seeds with intervals, and the claim's comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final, Literal

import numpy as np

from or1_megatron.ablate.ablation import Column, Expectation, Window

STUDENT_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantile 0.975 of Student's t with 1, 2, ... degrees of freedom; with more, 1.96 is close enough."""

ELAPSED: Final = "elapsed_s"
"""A column of every run: seconds of training so far, without start-up and evaluations, which all arms share."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with half the width of its 95% confidence interval (NaN: too few seeds)."""

    mean: float
    half_width: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds == 0:
            return "–"
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.3f}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The paired difference of two arms over the seeds, and what it says about the claim."""

    difference: Estimate
    verdict: Literal["as claimed", "the opposite", "not resolved", "not run"]


def with_columns(rows: Rows, columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Return the rows with ``ELAPSED`` and ``columns``. A row without the metric does not get its column.

    Worked example: for a metric of 1 and 3 in two rows, the distance from 2 is 1 and 1; the change is 2 in the second.
    """
    elapsed_s, found = 0.0, []
    before: dict[str, float] = {}
    for row in rows:
        elapsed_s += float(row.get("time/step", 0.0)) - float(row.get("time/evaluate", 0.0))
        made = {**row, ELAPSED: elapsed_s}
        for name, column in columns.items():
            value = row.get(column.metric)
            origin = before.get(name) if column.away_from is None else column.away_from
            if value is not None and origin is not None:
                made[name] = abs(float(value) - origin)
            if value is not None:
                before[name] = float(value)
        found.append(made)
    return found


def equal_times(arms: Iterable[Mapping[int, Rows]]) -> dict[int, float]:
    """Return {seed: seconds of training of its fastest arm} for the seeds that every arm has finished."""
    of_arms = [{seed: float(rows[-1][ELAPSED]) for seed, rows in arm.items() if rows} for arm in arms]
    seeds = set.intersection(*map(set, of_arms)) if of_arms else set()
    return {seed: min(of_arm[seed] for of_arm in of_arms) for seed in sorted(seeds)}


def value_at_time(rows: Rows, metric: str, until_s: float) -> float | None:
    """Return the metric's mean over the last quarter of the first ``until_s`` seconds; None if no row has it.

    Values are interpolated linearly between rows, so that no arm gains from an evaluation just before the end.
    Worked example: 0.2 at 0 s, 0.6 at 100 s, until 80 s. From 60 s to 80 s it rises from 0.44 to 0.52: mean 0.48.
    """
    points = [(float(row[ELAPSED]), float(row[metric])) for row in rows if row.get(metric) is not None]
    if not points:
        return None
    times, values = np.array(points).T
    begin = 0.75 * until_s
    corners = np.unique([begin, until_s, *times[(times > begin) & (times < until_s)]])
    lines = np.interp(corners, times, values)
    return float(np.trapezoid(lines, corners) / (until_s - begin)) if until_s > 0 else float(lines[-1])


def value_over(rows: Rows, metric: str, window: Window, until_s: float | None = None) -> float | None:
    """Return the metric's mean over the window of the rows that have it; None if none has.

    ``until_s``: for the window equal_time; None: not known yet.
    """
    if window == "equal_time":
        return None if until_s is None else value_at_time(rows, metric, until_s)
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    if not values:
        return None
    quarter = max(1, len(values) // 4)
    chosen = {"early": values[:quarter], "late": values[-quarter:], "all": values, "last": values[-1:]}[window]
    return fmean(chosen)


def estimate(values: Iterable[float | None]) -> Estimate:
    """Return the mean of the values that are not None, with its 95% interval by Student's t."""
    found = [value for value in values if value is not None]
    if len(found) < 2:
        return Estimate(found[0] if found else math.nan, math.nan, len(found))
    freedom = len(found) - 1
    quantile = STUDENT_T_975[freedom - 1] if freedom <= len(STUDENT_T_975) else 1.96
    return Estimate(fmean(found), quantile * stdev(found) / math.sqrt(len(found)), len(found))


def compare(
    expectation: Expectation,
    higher: Mapping[int, Rows],
    lower: Mapping[int, Rows],
    until_s: Mapping[int, float] | None = None,
) -> Comparison:
    """Compare two arms seed by seed: with the same seed they start from the same weights and draw the same problems.

    ``until_s``: ``equal_times``, for the window of this name.
    """
    pairs = []
    for seed in sorted(higher.keys() & lower.keys()):
        until = (until_s or {}).get(seed)
        a = value_over(higher[seed], expectation.metric, expectation.window, until)
        b = value_over(lower[seed], expectation.metric, expectation.window, until)
        if a is not None and b is not None:
            pairs.append(a - b)
    difference = estimate(pairs)
    if len(pairs) < 2:
        return Comparison(difference, "not run")
    if difference.mean - difference.half_width > -expectation.margin:
        return Comparison(difference, "as claimed")
    if difference.mean + difference.half_width < -expectation.margin:
        return Comparison(difference, "the opposite")
    return Comparison(difference, "not resolved")


def mean_curve(runs: Sequence[Rows], metric: str, over: str = "step") -> list[tuple[float, float, float, float]]:
    """Return (x, mean, lowest, highest) at each step, over the seeds that have the metric there.

    ``over``: the column whose mean over those seeds is x.
    """
    by_step: dict[int, list[tuple[float, float]]] = {}
    for rows in runs:
        for row in rows:
            if row.get(metric) is not None:
                by_step.setdefault(int(row["step"]), []).append((float(row[over]), float(row[metric])))
    curve = []
    for _, found in sorted(by_step.items()):
        places, values = zip(*found, strict=True)
        curve.append((fmean(places), fmean(values), min(values), max(values)))
    return curve
