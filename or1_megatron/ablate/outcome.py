"""What an ablation's runs came to: means over seeds with intervals, and whether the claim's comparisons held."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Final, Literal

import numpy as np

from or1_megatron.ablate.ablation import Column, Expectation, Window

STUDENT_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantile 0.975 of Student's t with 1, 2, ... degrees of freedom; beyond them 1.96 is near enough."""

ELAPSED: Final = "elapsed_s"
"""A column of every run: seconds of training so far, start-up and evaluations apart, which all arms have alike."""

Rows = Sequence[Mapping[str, Any]]


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


def with_columns(rows: Rows, columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """The rows with ``ELAPSED`` and ``columns``; a row without the metric has no column made of it.

    Worked example: of a metric that is 1, 3 in two rows, |metric - 2| is 1, 1; its change is 2 in the second.
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
    """Seed -> seconds of training of the arm that took the fewest; of the seeds that every arm has."""
    of_arms = [{seed: float(rows[-1][ELAPSED]) for seed, rows in arm.items() if rows} for arm in arms]
    seeds = set.intersection(*map(set, of_arms)) if of_arms else set()
    return {seed: min(of_arm[seed] for of_arm in of_arms) for seed in sorted(seeds)}


def value_at_time(rows: Rows, metric: str, until_s: float) -> float | None:
    """The metric's mean over the last quarter of the first ``until_s`` seconds; None when no row has it.

    Between two rows it is taken as a straight line: an arm must not gain from being evaluated just before the end.
    Worked example: 0.2 at 0 s, 0.6 at 100 s, until 80 s: over 60 s to 80 s it goes from 0.44 to 0.52: 0.48.
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
    """The metric's mean over the window of the rows that have it, or its last value; None when none has.

    ``until_s``: for the window equal_time; None: there is none yet.
    """
    if window == "equal_time":
        return None if until_s is None else value_at_time(rows, metric, until_s)
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


def look(
    expectation: Expectation,
    higher: Mapping[int, Rows],
    lower: Mapping[int, Rows],
    until_s: Mapping[int, float] | None = None,
) -> Seen:
    """Compare two arms, seed by seed: of one seed they start from the same weights and draw the same problems.

    ``until_s``: seed -> ``equal_times``, for the window of that name.
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
        return Seen(expectation, difference, "not run")
    if difference.mean - difference.half_width > -expectation.margin:
        return Seen(expectation, difference, "as claimed")
    if difference.mean + difference.half_width < -expectation.margin:
        return Seen(expectation, difference, "the opposite")
    return Seen(expectation, difference, "not resolved")


def mean_curve(runs: Sequence[Rows], metric: str, over: str = "step") -> list[tuple[float, float, float, float]]:
    """(step, mean, lowest, highest) over the seeds that have the metric at that step.

    ``over``: another column to stand in the step's place, by its mean over those seeds.
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
