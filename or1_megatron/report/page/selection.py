"""Chooses the responses that the HTML page shows in full, reproducibly."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from or1_megatron.runtime.rollout_store import HELD_OUT
from or1_verify.errors import UserError

_PARTS = 12
"""A run's steps are cut into this many parts, and responses are chosen evenly from all parts."""


class UnknownRollout(UserError, ValueError):
    """``--ids`` names a response that no given run has kept."""


def choose(rows: pd.DataFrame, count: int) -> list[int]:
    """Choose up to ``count`` responses to show in full, and return their rows' indices in the order of choice.

    Two responses are of one kind if they have the same run, part of the steps, rightness, truncation and source. First
    one response of each kind is chosen, then a second of each kind, and so on."""
    drawn = rows.sample(frac=1, random_state=0)
    part = (drawn["step"].rank(method="dense") - 1) * _PARTS // max(drawn["step"].nunique(), 1)
    kinds = [drawn["run"], part, drawn["status"] == "right", drawn["truncated"], drawn["source"]]
    turns = drawn.groupby(kinds, observed=True).cumcount()
    return turns.sort_values(kind="stable").index[:count].tolist()


def pairs(rows: pd.DataFrame, count: int) -> list[int]:
    """Choose up to ``count`` held-out responses to compare, and return their row indices. The problems are those whose
    pass rate changed most between a run's first and last evaluation. Each problem gives a right and a wrong response,
    one from each of the two evaluations."""
    rows = rows[rows["stage"] == HELD_OUT].astype({"problem": str})
    steps, each = rows.groupby("run")["step"], ["run", "problem", "step"]
    sign = (rows["step"] == steps.transform("max")) * 1 - (rows["step"] == steps.transform("min")) * 1
    right = (rows["status"] == "right") * sign / rows.groupby(each)["step"].transform("size")
    rows = rows.assign(change=right.groupby([rows["run"], rows["problem"]]).transform("sum"))
    best = rows.assign(fit=right * rows["change"])[sign != 0].sort_values("fit", ascending=False, kind="stable")
    best = best.drop_duplicates(each).sort_values(["change", *each])
    return [*best.index[best["change"] < 0][: count // 2], *best.index[best["change"] > 0][-(count // 2) :]][:count]


def named(rows: pd.DataFrame, ids: Sequence[str]) -> list[int]:
    """Return the row indices of the responses that ``ids`` name, in the order of ``ids``, each once.

    An id is PROBLEM, PROBLEM/STEP or PROBLEM/STEP/SAMPLE, where PROBLEM is a problem's id or the id's beginning. Raises
    UnknownRollout if no kept response has such an id.
    """
    wanted: dict[int, None] = {}
    for name in ids:
        problem, step, sample = (*name.split("/", 2), "", "")[:3]
        if not problem or any(part and not part.isdigit() for part in (step, sample)):
            raise UnknownRollout(f"--ids {name}: expected PROBLEM, PROBLEM/STEP or PROBLEM/STEP/SAMPLE")
        fits = rows[rows["problem"].astype(str).str.startswith(problem)]
        if fits.empty:
            raise UnknownRollout(f"--ids {name}: no rollout of a problem '{problem}' is kept")
        steps = fits["step"].unique()
        for column, value in (("step", step), ("sample", sample)):
            fits = fits[fits[column] == int(value)] if value else fits
        if fits.empty:
            listed = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
            raise UnknownRollout(f"--ids {name}: no such rollout is listed; the problem's are of step {listed}")
        wanted |= dict.fromkeys(fits.index.tolist())
    return list(wanted)
