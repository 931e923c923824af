"""The choice of responses that a page lists and shows in full: the same for the same runs on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from or1_verify.errors import UserError

_STEP_BUCKETS = 12

Columns = Mapping[str, NDArray[Any]]


class UnknownRollout(UserError, ValueError):
    """``--ids`` names a response that no given run has kept."""


def choose(columns: Columns, count: int) -> NDArray[np.int64]:
    """Return up to ``count`` row numbers in the order of choice, spread over run, step, reward, truncation and source.

    Rows that are equal in all five form a stratum. Each choice is the next row of the stratum whose properties were
    chosen least so far, so that rare rows (the few truncated ones, a small source) come early, and no step dominates.
    Reward, truncation and the part of the run count as one property: each part gets right, wrong and truncated rows.

    Args:
        columns: run, step, reward, truncated, source, [n] each.
    """
    rows = len(columns["step"])
    if rows == 0 or count <= 0:
        return np.empty(0, np.int64)
    run, source, step, reward = (_codes(columns[name]) for name in ("run", "source", "step", "reward"))
    bucket = step * _STEP_BUCKETS // (step.max() + 1)
    of_part = np.stack([run, bucket, reward, columns["truncated"].astype(np.int64)], axis=1)
    outcome = np.unique(of_part, axis=0, return_inverse=True)[1].reshape(-1)
    keys = np.stack([run, source, step, outcome], axis=1)
    strata, of_row = np.unique(keys, axis=0, return_inverse=True)
    of_row = of_row.reshape(-1)
    members = np.argsort(of_row, kind="stable")  # the rows stratum by stratum
    begins = np.searchsorted(of_row[members], np.arange(len(strata)))
    sizes = np.bincount(of_row, minlength=len(strata))
    used = np.zeros(len(strata), np.int64)
    chosen_with = [np.zeros(int(strata[:, place].max()) + 1, np.int64) for place in range(strata.shape[1])]
    ranks = _scattered(len(strata))
    chosen = []
    for _ in range(min(count, rows)):
        # Times the number of values: a value of a property with few values may be chosen more often.
        loads = [seen[strata[:, place]] * seen.size for place, seen in enumerate(chosen_with)]
        load = np.where(used < sizes, np.sum(loads, axis=0), np.iinfo(np.int64).max)
        best = np.flatnonzero(load == load.min())
        stratum = int(best[np.argmin(ranks[best])])
        within = _spread(int(used[stratum]), int(sizes[stratum]))
        chosen.append(int(members[begins[stratum] + within]))
        used[stratum] += 1
        for place, seen in enumerate(chosen_with):
            seen[strata[stratum, place]] += 1
    return np.array(chosen, np.int64)


def named(columns: Columns, problem_ids: Sequence[str], ids: Sequence[str]) -> NDArray[np.int64]:
    """Return the rows that ``ids`` name, in their order, each once.

    An id is PROBLEM, PROBLEM/STEP or PROBLEM/STEP/SAMPLE; PROBLEM may be its first digits. ``columns``: problem (places
    in ``problem_ids``), step, sample. Raises UnknownRollout with the steps that there are.
    """
    found = [np.empty(0, np.int64)]
    for wanted in ids:
        problem, _, rest = wanted.partition("/")
        step, _, sample = rest.partition("/")
        if not problem or any(part and not part.isdigit() for part in (step, sample)):
            raise UnknownRollout(f"--ids {wanted}: expected PROBLEM, PROBLEM/STEP or PROBLEM/STEP/SAMPLE")
        fits = np.array([known.startswith(problem) for known in problem_ids], np.bool_)[columns["problem"]]
        if not fits.any():
            raise UnknownRollout(f"--ids {wanted}: no rollout of a problem '{problem}' is kept")
        steps = np.unique(columns["step"][fits])
        if step:
            fits &= columns["step"] == int(step)
        if sample:
            fits &= columns["sample"] == int(sample)
        if not fits.any():
            listed = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
            raise UnknownRollout(f"--ids {wanted}: no such rollout is kept; the problem was sampled in step {listed}")
        found.append(np.flatnonzero(fits))
    rows: NDArray[np.int64] = np.concatenate(found)
    return rows[np.sort(np.unique(rows, return_index=True)[1])]


def thinned(columns: Columns, limit: int, always: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rising row numbers: all, or if they are more than ``limit`` those of every n-th step of each run.

    If these are still too many, rows are left out evenly. Rows in ``always`` stay in any case.
    """
    rows = len(columns["step"])
    if rows <= limit:
        return np.arange(rows)
    every = -(-rows // limit)
    keep = np.zeros(rows, np.bool_)
    for run in np.unique(columns["run"]):
        of_run = columns["run"] == run
        steps = np.unique(columns["step"][of_run])
        keep |= of_run & np.isin(columns["step"], steps[::-1][::every])  # the newest stays
    left = np.flatnonzero(keep)
    if len(left) > limit:
        left = left[np.arange(limit) * len(left) // limit]
    return np.union1d(left, always)


def _codes(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return [n] the values as 0, 1, ... in their order; nan counts as a value."""
    found: NDArray[np.int64] = np.unique(values, return_inverse=True)[1]
    return found.reshape(-1)


def _scattered(count: int) -> NDArray[np.uint64]:
    """Return [count] different numbers in scattered order (multiplicative hashing), the same everywhere."""
    return (np.arange(count, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(1 << 32)


def _spread(turn: int, size: int) -> int:
    """Return the turn-th place (from 0) of a walk that visits all of ``size`` once, in large strides."""
    stride = max(1, round(size * 0.6180339887))
    while np.gcd(stride, size) != 1:
        stride += 1
    return turn * stride % size
