"""Which sequence lies in which row of which data-parallel rank, planned from lengths alone (``rl.batch`` fills rows).

All rows of a step have one length T, since pipeline shapes are static, and every rank computes R of them. With L an
extent, that is a sequence's length rounded up to what context parallelism asks for, a rank's work is

    linear * R * T + quadratic * (sum of L^2 over its sequences and over the padding at the end of each row)

and a step lasts as long as its costliest rank. R is the least that holds all sequences under the budget, T the least
for that R (best fit, longest first, bisected over T). A second placement, by cost into the cheapest row with room, pads
a little more and balances better where R is small; of the two the one whose costliest rank has less to do is taken.
Rows go to ranks in layers of equal rank by cost: the layer with the widest spread first, its costliest row to the rank
that has least so far. All of it is deterministic: ties go to the earlier sample, row and rank.

What no plan can do: T is never below the longest sequence, so where the budget is near it, R being whole costs up to
1 / R of padding; and no rank is faster than the longest sequence alone, however few its samples.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Rows = list[list[int]]  # of each row the sequences, by their index


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """What a sequence of L tokens costs: ``linear * L + quadratic * L**2``, in any unit. It steers balance only."""

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        if not (self.linear > 0 and self.quadratic >= 0):
            raise ValueError(f"{self}: expected linear > 0 and quadratic >= 0")

    @classmethod
    def of_decoder(cls, weights: int, attention_width: int) -> SequenceCost:
        """FLOPs of a forward pass (backward is about twice that in both terms).

        Two per weight and token. A pair of tokens takes 2 * width for its score and as many for its value; causality
        leaves L^2 / 2 pairs.

        Args:
            weights: that multiply every token: all but the input embedding, the output layer among them, tied or not.
            attention_width: layers * heads * head_dim.
        """
        return cls(2.0 * weights, 2.0 * attention_width)


QWEN2_7B = SequenceCost.of_decoder(7_070_619_136, 28 * 28 * 128)
"""Attention costs as much as all else at 70K tokens."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How rows are cut: for how many data-parallel ranks, how long, in multiples of what.

    Raises:
        ValueError: ``alignment`` is not a multiple of ``sequence_alignment``.
    """

    data_ranks: int
    budget_tokens: int
    """A row holds at most this many tokens (rounded up to ``alignment``)."""
    alignment: int
    """T is a multiple of it: 2 * CP * TP."""
    sequence_alignment: int = 1
    """Each sequence's extent in the row is a multiple of it: 2 * CP when CP > 1, which cuts every sequence in as many
    chunks."""
    rows_multiple: int = 1
    """Rows per rank are a multiple of it: the pipeline size where stages are interleaved."""
    cost: SequenceCost = QWEN2_7B
    fixed_length: bool = False
    """Every row is as long as the budget, in every step: for buffers that are allocated for one length."""

    def __post_init__(self) -> None:
        if self.alignment % self.sequence_alignment:
            raise ValueError(
                f"BatchLayout: alignment = {self.alignment} is not a multiple of sequence_alignment = "
                f"{self.sequence_alignment}; a row ends where a sequence may end"
            )

    @property
    def capacity_tokens(self) -> int:
        return -(-self.budget_tokens // self.alignment) * self.alignment


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a step, costliest first within each rank."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]  # [DP][R] rows of sample indices; a row may be empty
    row_tokens: int  # T
    slowest_cost: float  # of the costliest rank, padding included


def plan_rows(lengths: Ints, layout: BatchLayout) -> RowPlan:
    """Place sequences of these lengths [n], n >= 1, none above ``layout.capacity_tokens``, each in exactly one row."""
    extents = -(-lengths // layout.sequence_alignment) * layout.sequence_alignment
    sizes: list[int] = extents.tolist()
    order: list[int] = np.argsort(-extents, kind="stable").tolist()
    ranks, unit = layout.data_ranks, layout.alignment
    used = len(_best_fit(sizes, order, layout.capacity_tokens))
    per_rank = -(-used // (ranks * layout.rows_multiple)) * layout.rows_multiple
    count = per_rank * ranks
    lowest = -(-max(max(sizes), -(-sum(sizes) // count)) // unit)  # T in units of the alignment, as is all bisected

    def tight(units: int) -> Rows | None:
        rows = _best_fit(sizes, order, units * unit)
        return rows + [[] for _ in range(count - len(rows))] if len(rows) <= count else None

    def even(units: int) -> Rows | None:
        return _cheapest(extents, layout.cost, order, count, units * unit)

    rows = _shortest(tight, lowest, layout.capacity_tokens // unit)
    assert rows is not None  # at full capacity it is what gave ``count``
    best = _deal(rows, extents, layout)
    # However even, rows longer than this cost a rank more than the best plan's costliest.
    squares = layout.cost.quadratic * float(np.square(extents, dtype=np.float64).sum()) / ranks
    longest_tokens = (best.slowest_cost - squares) / (layout.cost.linear * per_rank)
    rows = _shortest(even, lowest, min(int(longest_tokens), layout.capacity_tokens) // unit)
    return best if rows is None else min(best, _deal(rows, extents, layout), key=lambda plan: plan.slowest_cost)


def _shortest(place: Callable[[int], Rows | None], lowest: int, highest: int) -> Rows | None:
    """The rows for the least row length from ``lowest`` to ``highest`` at which ``place`` finds a way, or None."""
    best = place(highest) if lowest <= highest else None
    while best is not None and lowest < highest:
        middle = (lowest + highest) // 2
        rows = place(middle)
        if rows is None:
            lowest = middle + 1
        else:
            best, highest = rows, middle
    return best


def _best_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Rows:
    """In ``order``, each sequence into the row that it leaves the least room in; a new row when it fits in none."""
    rows: Rows = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for i in order:
        place = bisect_left(rooms, (sizes[i], -1))
        if place == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(i)
        insort(rooms, (room - sizes[i], row))
    return rows


def _cheapest(extents: Ints, cost: SequenceCost, order: Sequence[int], count: int, capacity: int) -> Rows | None:
    """In ``order``, each sequence into the cheapest of ``count`` rows that has room; None when one fits in none."""
    costs = cost.linear * extents + cost.quadratic * np.square(extents, dtype=np.float64)
    rows: Rows = [[] for _ in range(count)]
    rooms, loads = np.full(count, capacity), np.zeros(count)
    for i in order:
        row = int(np.where(rooms >= extents[i], loads, np.inf).argmin())
        if rooms[row] < extents[i]:
            return None
        rows[row].append(i)
        rooms[row] -= extents[i]
        loads[row] += costs[i]
    return rows


def _deal(rows: Rows, extents: Ints, layout: BatchLayout) -> RowPlan:
    """Rows to ranks, the same number to each."""
    filled = np.array([extents[row].sum() for row in rows], dtype=np.int64)
    longest = layout.budget_tokens if layout.fixed_length else int(filled.max())
    row_tokens = -(-longest // layout.alignment) * layout.alignment
    squares = np.array([np.square(extents[row], dtype=np.float64).sum() for row in rows])
    squares += np.square(row_tokens - filled, dtype=np.float64)
    costs: Floats = layout.cost.linear * row_tokens + layout.cost.quadratic * squares
    layers = np.argsort(-costs, kind="stable").reshape(-1, layout.data_ranks)  # [R, DP] rows, by descending cost
    spreads = costs[layers[:, 0]] - costs[layers[:, -1]]
    dealt, loads = np.empty_like(layers), np.zeros(layout.data_ranks)
    for layer in np.argsort(-spreads, kind="stable"):
        ranks = np.argsort(loads, kind="stable")
        dealt[layer, ranks] = layers[layer]
        loads[ranks] += costs[layers[layer]]
    return RowPlan(
        ranks=tuple(tuple(tuple(rows[row]) for row in members) for members in dealt.T.tolist()),
        row_tokens=row_tokens,
        slowest_cost=float(loads.max()),
    )
