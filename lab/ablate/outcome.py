"""The outcome of an ablation: values over windows of the runs, the claim's comparisons, conditions of entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np

from lab.ablate.ablation import Ablation, Arms, Column, Expectation, Window
from lab.ablate.statistics import Estimate, estimate, holm, p_value

ELAPSED: Final = "elapsed_s"
"""A column of every run: seconds of training so far. Start-up and evaluations, which all arms share, do not count."""

_COUNTED: Final = ("step", "time/step", "time/evaluate")
"""The metrics that every page reads."""

Rows = Sequence[Mapping[str, Any]]

ArmRows = Mapping[str, Mapping[int, Rows]]
"""{name of the arm: {seed: rows of metrics}} of the finished runs."""


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """The paired difference of two arms over the seeds, and the verdict on the claim."""

    difference: Estimate
    """The difference with an interval of 95%."""
    corrected: Estimate
    """The same difference with an interval at the level of Holm's correction, which decides the verdict."""
    verdict: Literal["as claimed", "the opposite", "no difference", "not resolved", "not run"]


def read_metrics(ablations: Iterable[Ablation]) -> list[str]:
    """Return the names of all metrics that the ablations' pages, comparisons and conditions read."""
    named = set[str]().union(*(ablation.metrics() for ablation in ablations))
    return [*_COUNTED, *sorted(named - set(_COUNTED))]


def reads_seconds(chosen: Arms) -> bool:
    """Return whether a comparison reads seconds, which depend on other work of the machine."""
    return chosen.equal_time or any(expected.metric == ELAPSED for expected in chosen.expects)


def with_columns(rows: Rows, columns: Mapping[str, Column]) -> list[dict[str, Any]]:
    """Return the rows with ``ELAPSED`` and ``columns``. A row without a column's metric does not get the column.

    Worked example: for a metric of 1 and 3 in two rows, the distance from 2 is 1 and 1; the change is 2 in the second.
    """
    elapsed_s, complete = 0.0, []
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
        complete.append(made)
    return complete


def equal_times(arms: Iterable[Mapping[int, Rows]]) -> dict[int, float]:
    """Return {seed: seconds of training that the seed's fastest arm took} for the seeds that every arm has finished."""
    of_arms = [{seed: float(rows[-1][ELAPSED]) for seed, rows in arm.items() if rows} for arm in arms]
    seeds = set.intersection(*map(set, of_arms)) if of_arms else set()
    return {seed: min(of_arm[seed] for of_arm in of_arms) for seed in sorted(seeds)}


def value_at_time(rows: Rows, metric: str, until_s: float) -> float | None:
    """Return the metric's mean over the last quarter of the first ``until_s`` seconds; None if no row has it.

    Values are interpolated linearly between rows, so that no arm gains from an evaluation just before the end.
    Worked example: 0.2 at 0 s, 0.6 at 100 s, until 80 s. From 60 s to 80 s the metric rises from 0.44 to 0.52, so the
    mean is 0.48.
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
    """Return the metric's mean over the window of the rows that have the metric; None if no row has.

    ``until_s``: the seconds of the window equal_time; None: not known yet.
    """
    if window == "equal_time":
        return None if until_s is None else value_at_time(rows, metric, until_s)
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    if not values:
        return None
    quarter = max(1, len(values) // 4)
    chosen = {"early": values[:quarter], "late": values[-quarter:], "all": values, "last": values[-1:]}[window]
    return fmean(chosen)


def compare(
    expectations: Sequence[Expectation], rows: ArmRows, until_s: Mapping[int, float] | None = None
) -> list[ArmComparison]:
    """Judge the comparisons of one ablation by paired differences, with Holm's correction over all of them.

    ``until_s``: the seconds by ``equal_times``, for the window equal_time. Comparisons with fewer than two seeds count
    in the correction.
    """
    pairs = [paired(expected, rows, until_s or {}) for expected in expectations]
    p_values = [
        p_value(differences, -expected.margin) if len(differences) > 1 else 1.0
        for expected, differences in zip(expectations, pairs, strict=True)
    ]
    return [_judged(*judged) for judged in zip(expectations, pairs, p_values, holm(p_values), strict=True)]


def paired(expectation: Expectation, rows: ArmRows, until_s: Mapping[int, float]) -> list[float]:
    """Return the differences of two arms, seed by seed. Runs of one seed have the same initial weights and problems."""
    higher, lower = rows.get(expectation.higher, {}), rows.get(expectation.than, {})
    differences = []
    for seed in sorted(higher.keys() & lower.keys()):
        a, b = (
            value_over(run, expectation.metric, expectation.window, until_s.get(seed))
            for run in (higher[seed], lower[seed])
        )
        if a is not None and b is not None:
            differences.append(a - b)
    return differences


def _judged(expectation: Expectation, pairs: Sequence[float], p: float, level: float) -> ArmComparison:
    difference, corrected = estimate(pairs), estimate(pairs, level)
    if len(pairs) < 2:
        return ArmComparison(difference, corrected, "not run")
    if p <= level:
        as_claimed = difference.mean > -expectation.margin
        return ArmComparison(difference, corrected, "as claimed" if as_claimed else "the opposite")
    none = expectation.within is not None and abs(corrected.mean) + corrected.half_width <= expectation.within
    return ArmComparison(difference, corrected, "no difference" if none else "not resolved")


def measure(chosen: Arms, rows: Mapping[str, Rows]) -> list[float | None]:
    """Return the value of each condition of entry. ``rows``: {arm: rows of the arm's run with the seed of entry}."""
    made = {arm: with_columns(run, chosen.columns) for arm, run in rows.items()}
    return [value_over(made.get(item.arm, ()), item.metric, item.window) for item in chosen.entry]
