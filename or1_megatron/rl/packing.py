"""Sequence packing under a token budget: plans, from lengths alone, each sequence's packed row and data-parallel rank.

``rl.batch`` fills the rows. All rows of a step have one length T, because pipeline shapes are static, and every rank
computes R rows. The extent L of a sequence is its length rounded up for context parallelism. A rank's work is

    linear * R * T + quadratic * (sum of L^2 over its sequences and over the padding at the end of each row)

and a step takes as long as its costliest rank. R is the smallest number of rows that hold all sequences under the
budget, and T is the smallest length for that R (best fit, longest first, bisected over T). The rows are sorted by cost
and cut into layers of one row per rank. The layer with the widest spread of costs is dealt first, and its costliest row
goes to the rank with the least work so far. The result is deterministic: ties go to the earlier sample, row and rank.

Limits: where the budget is near the longest sequence, up to 1 / R of the tokens is padding, because R is an integer.
Another plan with the same T could then balance the costs better, by 1% (33 rows) to 7% (3 rows). With a budget of
1.5 times the longest sequence, neither effect shows. No step is faster than the longest sequence alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Rows = list[list[int]]  # for each row, the indices of its sequences


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """The cost of a sequence of L tokens: ``linear * L + quadratic * L**2``, in any unit. It serves to balance rows."""

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        if not (self.linear > 0 and self.quadratic >= 0):
            raise ValueError(f"{self}: expected linear > 0 and quadratic >= 0")

    @classmethod
    def of_decoder(cls, weights: int, attention_width: int) -> SequenceCost:
        """Return the FLOPs of a forward pass of a decoder (a backward pass has about twice as many in both terms).

        Each token takes 2 FLOPs per weight. Each of the L^2 / 2 causal pairs of tokens takes 2 * ``attention_width``
        for its score and as many for its value.

        Args:
            weights: number of weights that multiply every token, including the output layer, not the input embedding.
            attention_width: layers * heads * head_dim.
        """
        return cls(2.0 * weights, 2.0 * attention_width)


QWEN2_7B = SequenceCost.of_decoder(7_070_619_136, 28 * 28 * 128)
"""With this cost, attention takes as many FLOPs as everything else at 70K tokens."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The limits of packed rows. Raises ValueError when ``alignment`` is no multiple of ``sequence_alignment``."""

    data_ranks: int
    budget_tokens: int
    """A row holds at most this many tokens (rounded up to ``alignment``)."""
    alignment: int
    """T is a multiple of this number (2 * CP * TP)."""
    sequence_alignment: int = 1
    """Each extent is a multiple of this number: 2 * CP when CP > 1, because CP cuts a sequence into 2 * CP chunks."""
    rows_multiple: int = 1
    """R is a multiple of this number: the pipeline size where pipeline stages are interleaved."""
    cost: SequenceCost = QWEN2_7B

    def __post_init__(self) -> None:
        if self.alignment % self.sequence_alignment:
            raise ValueError(
                f"BatchLayout: alignment = {self.alignment} is not a multiple of sequence_alignment = "
                f"{self.sequence_alignment}; expected one, because a row ends where a sequence may end"
            )

    @property
    def capacity_tokens(self) -> int:
        return -(-self.budget_tokens // self.alignment) * self.alignment


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a step, sorted within each rank with the costliest first."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]  # [DP][R] rows of sample indices; a row may be empty
    row_tokens: int  # T
    slowest_cost: float  # cost of the costliest rank, with padding


def plan_rows(lengths: Ints, layout: BatchLayout) -> RowPlan:
    """Return the plan for n >= 1 sequences of ``lengths`` [n] tokens, at most ``layout.capacity_tokens`` each."""
    extents = -(-lengths // layout.sequence_alignment) * layout.sequence_alignment
    sizes: list[int] = extents.tolist()
    order: list[int] = np.argsort(-extents, kind="stable").tolist()
    ranks, unit = layout.data_ranks, layout.alignment
    used = len(_best_fit(sizes, order, layout.capacity_tokens))
    per_rank = -(-used // (ranks * layout.rows_multiple)) * layout.rows_multiple
    count = per_rank * ranks
    lowest, highest = -(-max(max(sizes), -(-sum(sizes) // count)) // unit), layout.capacity_tokens // unit
    while lowest < highest:  # T in units of the alignment; full capacity is known to do
        middle = (lowest + highest) // 2
        if len(_best_fit(sizes, order, middle * unit)) > count:
            lowest = middle + 1
        else:
            highest = middle
    rows = _best_fit(sizes, order, highest * unit)
    return _deal(rows + [[] for _ in range(count - len(rows))], extents, layout)


def _best_fit(sizes: Sequence[int], order: Sequence[int], capacity: int) -> Rows:
    """Return rows. Each sequence, in ``order``, goes into the fullest row that has room for it, or into a new row."""
    rows: Rows = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for i in order:
        at = bisect_left(rooms, (sizes[i], -1))
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(at)
        rows[row].append(i)
        insort(rooms, (room - sizes[i], row))
    return rows


def _deal(rows: Rows, extents: Ints, layout: BatchLayout) -> RowPlan:
    """Return a plan that gives each rank the same number of rows and nearly the same cost."""
    filled = np.array([extents[row].sum() for row in rows], dtype=np.int64)
    row_tokens = -(-int(filled.max()) // layout.alignment) * layout.alignment
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
