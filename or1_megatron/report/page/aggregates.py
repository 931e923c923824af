"""Computes the HTML page's histograms and the migration of pass rates, from all responses that a run has kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from or1_megatron.runtime.rollout_store import HELD_OUT

_LENGTH_BINS = 40

PASS_RATES = ("0%", "0–25%", "25–50%", "50–75%", "75–100%", "100%")
"""Bins of pass rates: exactly 0%, intervals [low, high), and exactly 100%."""

NOT_SEEN = len(PASS_RATES)
"""Bin of a problem that was not sampled in a period."""


def histograms(rows: pd.DataFrame, limits: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return, for each stage with kept rollouts, histograms of response lengths and of truncated responses per group.

    Args:
        limits: longest response T of each stage, by its name.
    """
    return [
        {
            "stage": name,
            "responses": len(stage),
            "steps": [int(stage["step"].min()), int(stage["step"].max())],
            "limit": limits.get(name),
            "lengths": length_histogram(stage, limits.get(name, 0)),
            "truncated": truncation_histogram(stage),
        }
        for name, stage in _stages(rows).items()
    ]


def length_histogram(rows: pd.DataFrame, limit: int) -> dict[str, Any]:
    """Return the histogram of response lengths: ``edges`` [bins + 1] in tokens, ``counts`` [bins] by outcome."""
    longest = max(int(rows["tokens"].max()), limit, 1)
    width = -(-(longest + 1) // _LENGTH_BINS)
    edges = np.arange(0, longest + 1 + width, width)
    right, truncated = rows["status"] == "right", rows["truncated"]
    kinds = {"right": right & ~truncated, "not right": ~right & ~truncated, "truncated": truncated}
    counts = {kind: np.histogram(rows["tokens"][which], edges)[0].tolist() for kind, which in kinds.items()}
    return {"edges": edges.tolist(), "counts": counts}


def truncation_histogram(rows: pd.DataFrame) -> list[int]:
    """Return the number of groups with 0, 1, ... truncated responses, up to the group size."""
    groups = rows.groupby((rows["sample"] == 0).cumsum())["truncated"]
    return np.bincount(groups.sum(), minlength=int(groups.size().max()) + 1).tolist()


def migration(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Return how problems' pass rates change between periods (stages, or the halves of a one-stage run), or None.

    The result has ``periods`` (names), ``bins`` [periods][problems] (index in PASS_RATES, or NOT_SEEN), and ``tables``
    {"i-j": [NOT_SEEN + 1][NOT_SEEN + 1]}: numbers of problems by their bins in periods i and j. It is None for a run of
    one period. Problems are in the order of the categories of column ``problem``.
    """
    periods = _periods(rows)
    if len(periods) < 2:
        return None
    bins = [_rate_bins(period) for period in periods.values()]
    tables = {}
    for i, before in enumerate(bins):
        for j in range(i + 1, len(bins)):
            table = np.zeros((NOT_SEEN + 1, NOT_SEEN + 1), np.int64)
            np.add.at(table, (before, bins[j]), 1)
            table[NOT_SEEN, NOT_SEEN] = 0  # problems of other runs or other periods
            tables[f"{i}-{j}"] = table.tolist()
    return {"periods": list(periods), "bins": bins, "tables": tables}


def _stages(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the table's rows of each stage, by name, in the order of steps."""
    return {str(name): stage for name, stage in rows.groupby("stage", sort=False, observed=True)}


def _periods(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    rows = rows[rows["stage"] != HELD_OUT]
    stages, steps = _stages(rows), rows["step"].unique()
    if len(stages) > 1 or len(steps) < 2:
        return stages
    late = rows["step"] >= steps[len(steps) // 2]
    return {f"steps {half['step'].min()}–{half['step'].max()}": half for half in (rows[~late], rows[late])}


def _rate_bins(rows: pd.DataFrame) -> NDArray[np.uint8]:
    """Return the bin of each problem's pass rate, [problems]."""
    rates = (rows["status"] == "right").groupby(rows["problem"], observed=False).mean().to_numpy()
    quarters = 1 + np.floor(4 * np.nan_to_num(rates))
    special = [np.isnan(rates), rates == 0, rates == 1]
    return np.select(special, [NOT_SEEN, 0, len(PASS_RATES) - 1], quarters).astype(np.uint8)
