"""The page's histograms and the migration of pass rates, over all responses that a run has kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from or1_megatron.report.page.recordings import Recording
from or1_megatron.report.page.rollout_table import RolloutTable

_LENGTH_BINS = 40
_MOST_OF_A_GROUP = 32
"""Groups of one size, up to this, get a bar for each number of truncated responses, other groups one for each tenth."""

PASS_RATES = ("0%", "0–25%", "25–50%", "50–75%", "75–100%", "100%")
"""Bins of a pass rate: exactly 0%, [low, high) between, exactly 100%."""

NOT_SEEN = len(PASS_RATES)
"""The bin of a problem that was not sampled in the period."""

_KINDS = ("right", "not right", "truncated")


def histograms(recording: Recording) -> list[dict[str, Any]]:
    """Return for each stage of the kept rollouts: response lengths by outcome, and truncated responses per group."""
    rows = recording.rows
    groups = rows.groups()
    found = []
    for _, name, of_stage in rows.stages():
        limit = next((stage.max_response_tokens for stage in recording.stages if stage.name == name), None)
        found.append(
            {
                "stage": name,
                "responses": int(of_stage.sum()),
                "steps": [int(rows["step"][of_stage].min()), int(rows["step"][of_stage].max())],
                "limit": limit,
                "lengths": length_histogram(rows, of_stage, limit),
                "truncated": truncation_histogram(rows["truncated"][of_stage], groups[of_stage]),
            }
        )
    return found


def length_histogram(rows: RolloutTable, which: NDArray[np.bool_], limit: int | None) -> dict[str, Any]:
    """Return ``edges`` [bins + 1] in tokens, and ``counts`` [bins] of right, not right and truncated responses."""
    tokens = rows["tokens"][which]
    longest = max(int(tokens.max(initial=0)), limit or 0, 1)
    width = -(-(longest + 1) // _LENGTH_BINS)
    edges = np.arange(0, longest + 1 + width, width)
    truncated, right = rows["truncated"][which], rows["reward"][which] > 0
    masks = (right & ~truncated, ~right & ~truncated, truncated)
    counts = {kind: np.histogram(tokens[mask], edges)[0].tolist() for kind, mask in zip(_KINDS, masks, strict=True)}
    return {"edges": edges.tolist(), "counts": counts}


def truncation_histogram(truncated: NDArray[np.bool_], groups: NDArray[np.int64]) -> dict[str, Any]:
    """Return ``labels`` and ``counts``: how many groups have so many truncated responses."""
    _, of_row = np.unique(groups, return_inverse=True)
    sizes = np.bincount(of_row)
    cut = np.bincount(of_row, weights=truncated).astype(np.int64)
    if sizes.size and sizes.min() == sizes.max() <= _MOST_OF_A_GROUP:
        size = int(sizes[0])
        return {"labels": [str(n) for n in range(size + 1)], "counts": np.bincount(cut, minlength=size + 1).tolist()}
    tenths = np.minimum(cut * 10 // np.maximum(sizes, 1), 10)
    labels = [f"{10 * n}%" for n in range(11)]
    return {"labels": labels, "counts": np.bincount(tenths, minlength=11).tolist()}


def migration(recording: Recording, problems: Sequence[str]) -> dict[str, Any] | None:
    """Return how pass rates of problems move between periods: the stages, or the halves of a run of one stage.

    The result has ``periods`` (names), ``bins`` [periods][problems] (places in PASS_RATES, or NOT_SEEN), and ``tables``
    {"i-j": [NOT_SEEN + 1][NOT_SEEN + 1]}: counts of problems by their bins in periods i and j. None: only one period.

    Args:
        problems: all problem ids, in the order of ``bins``.
    """
    rows = recording.rows
    named = _periods(rows)
    if len(named) < 2:
        return None
    place_of = {problem: place for place, problem in enumerate(problems)}
    of_row = np.array([place_of[problem] for problem in rows.words["problem"]], dtype=np.int64)[rows["problem"]]
    bins = [_rate_bins(of_row[which], rows["reward"][which] > 0, len(problems)) for _, which in named]
    tables = {}
    for i, before in enumerate(bins):
        for j in range(i + 1, len(bins)):
            table = np.zeros((NOT_SEEN + 1, NOT_SEEN + 1), np.int64)
            np.add.at(table, (before, bins[j]), 1)
            table[NOT_SEEN, NOT_SEEN] = 0  # problems of other runs or other periods
            tables[f"{i}-{j}"] = table.tolist()
    return {"periods": [name for name, _ in named], "bins": bins, "tables": tables}


def _periods(rows: RolloutTable) -> list[tuple[str, NDArray[np.bool_]]]:
    stages = rows.stages()
    if len(stages) > 1:
        return [(name, which) for _, name, which in stages]
    steps = np.unique(rows["step"])
    if len(steps) < 2:
        return []
    half = steps[len(steps) // 2]
    early, late = rows["step"] < half, rows["step"] >= half
    return [(f"steps {rows['step'][which].min()}–{rows['step'][which].max()}", which) for which in (early, late)]


def _rate_bins(problem: NDArray[np.int64], right: NDArray[np.bool_], count: int) -> NDArray[np.uint8]:
    """Return [count] the bin of each problem's share of right responses."""
    seen = np.bincount(problem, minlength=count)
    passed = np.bincount(problem, weights=right, minlength=count)
    bins = 1 + np.minimum(4 * passed // np.maximum(seen, 1), 3)
    bins[passed == 0] = 0
    bins[passed == seen] = len(PASS_RATES) - 1
    bins[seen == 0] = NOT_SEEN
    return bins.astype(np.uint8)
