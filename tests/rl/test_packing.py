"""The plan of rows: hand-worked placements, the bounds on padding and balance, small cases against all placements.

Not proven: how long planning takes, and that FLOPs predict the seconds of a GPU.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from or1_megatron.rl.packing import BatchLayout, RowPlan, SequenceCost, plan_rows

BY_TOKENS = SequenceCost(1.0, 0.0)
QWEN_7B = SequenceCost(1.0, 1 / 70_000)  # attention costs as much as all else at 70K tokens
CAP = 32768


def plan(lengths: list[int], layout: BatchLayout) -> RowPlan:
    return plan_rows(np.array(lengths, dtype=np.int64), layout)


def contents(made: RowPlan, lengths: list[int]) -> list[list[list[int]]]:
    """Per rank, per row, the lengths in it; everything sorted."""
    return sorted(sorted(sorted(lengths[i] for i in row) for row in rank) for rank in made.ranks)


SQUARES = SequenceCost(1.0, 1.0)


@pytest.mark.parametrize(
    ("lengths", "layout", "rows", "row_tokens", "slowest"),
    [
        # Costs equal lengths: 6, 5, 4, 3 over two ranks, one row each of at most 10.
        ([3, 6, 4, 5], BatchLayout(2, 10, 1, cost=BY_TOKENS), [[[3, 6]], [[4, 5]]], 9, 9),
        ([5, 5, 4, 3, 3], BatchLayout(1, 10, 1, cost=BY_TOKENS), [[[3, 3, 4], [5, 5]]], 10, 20),
        # Four full rows of 8 in pairs: 8 (64), 4 + 4 (32), 4 + 4 (32), 2 + 2 + 2 + 2 (16): 64 + 16 and 32 + 32.
        ([2, 4, 8, 2, 4, 2, 4, 2, 4], BatchLayout(2, 8, 1, cost=SQUARES),
         [[[2, 2, 2, 2], [8]], [[4, 4], [4, 4]]], 8, 2 * 8 + 64 + 16),
        # Padding is paid for: the row of one 4 costs 8 + 16 + 16.
        ([8, 4, 4, 4], BatchLayout(3, 8, 1, cost=SQUARES), [[[4]], [[4, 4]], [[8]]], 8, 8 + 64),
        ([4, 4, 4], BatchLayout(1, 8, 1, cost=SQUARES), [[[4], [4, 4]]], 8, (8 + 32) + (8 + 32)),
        ([3, 4], BatchLayout(1, 30, 8, cost=BY_TOKENS), [[[3, 4]]], 8, 8),
    ],
)  # fmt: skip
def test_placements_by_hand(
    lengths: list[int], layout: BatchLayout, rows: list[list[list[int]]], row_tokens: int, slowest: float
) -> None:
    made = plan(lengths, layout)
    assert contents(made, lengths) == rows
    assert (made.row_tokens, made.slowest_cost) == (row_tokens, slowest)


def test_the_row_is_shorter_than_the_budget_and_aligned() -> None:
    """Extents 12, 12, 8 for 9, 10, 5. Under 40 one row of 32 would do, but rows come in twos: 12 + 12 or 12 + 8 in 24,
    a multiple of 8. Under 16 it takes three rows, so four."""
    made = plan([9, 10, 5], BatchLayout(1, 40, 8, sequence_alignment=4, rows_multiple=2))
    assert (len(made.ranks[0]), made.row_tokens) == (2, 24)
    made = plan([9, 10, 5], BatchLayout(1, 16, 8, sequence_alignment=4, rows_multiple=2))
    assert (len(made.ranks[0]), made.row_tokens) == (4, 16)


def long_cot(count: int, seed: int, sigma: float) -> NDArray[np.int64]:
    """Log-normal lengths, scaled until the mean of what the cap leaves is 8192."""
    drawn = np.exp(sigma * np.random.default_rng(seed).standard_normal(count))
    scale = 8192.0
    for _ in range(50):
        scale *= 8192 / np.minimum(scale * drawn, CAP).mean()
    return np.minimum(scale * drawn, CAP).astype(np.int64)


@pytest.mark.parametrize(
    ("count", "ranks", "budget", "alignments"),
    [(4096, 32, 65536, (8, 1)), (4096, 32, 49152, (64, 8)), (4096, 8, CAP, (16, 1)), (1024, 1, CAP, (16, 1))],
)
def test_bounds_on_long_cot_lengths(count: int, ranks: int, budget: int, alignments: tuple[int, int]) -> None:
    """The goals are 2% of padding and a slowest rank 3% above the mean. What is reached on these, counted here from the
    plan alone, is 1% and 0.3%, or 1% where the budget is the longest sequence."""
    for seed, sigma in ((0, 0.8), (1, 1.0)):
        lengths = long_cot(count, seed, sigma)
        made = plan_rows(lengths, BatchLayout(ranks, budget, *alignments, cost=QWEN_7B))
        assert sorted(i for rank in made.ranks for row in rank for i in row) == list(range(count))
        cells = ranks * len(made.ranks[0]) * made.row_tokens
        costs = [sum(lengths[i] + lengths[i] ** 2 / 70_000 for row in rank for i in row) for rank in made.ranks]
        assert 1 - lengths.sum() / cells <= 0.01
        assert max(costs) <= (1.003 if budget > CAP else 1.01) * np.mean(costs)


def all_placements(lengths: list[int], layout: BatchLayout, per_rank: int) -> float:
    """The least cost of the costliest rank over every way to put the sequences into rows, at the best T for each."""
    rows = per_rank * layout.data_ranks
    where = np.array(list(itertools.product(range(rows), repeat=len(lengths))))  # [ways, n]
    filled, squares = np.zeros((len(where), rows)), np.zeros((len(where), rows))
    for i, length in enumerate(lengths):
        extent = math.ceil(length / layout.sequence_alignment) * layout.sequence_alignment
        filled[np.arange(len(where)), where[:, i]] += extent
        squares[np.arange(len(where)), where[:, i]] += extent**2
    longest = np.ceil(filled.max(axis=1, keepdims=True) / layout.alignment) * layout.alignment
    costs = layout.cost.linear * longest + layout.cost.quadratic * (squares + (longest - filled) ** 2)
    slowest = costs.reshape(len(where), layout.data_ranks, per_rank).sum(axis=2).max(axis=1)
    slowest[longest[:, 0] > layout.capacity_tokens] = np.inf
    return float(slowest.min())


def test_close_to_the_best_of_all_placements() -> None:
    """Seven sequences on two ranks, one or two rows each: never 1/5 above the best plan, under 3% on average, and no
    row a rank could have been saved."""
    rng = np.random.default_rng(11)
    ratios = []
    for _ in range(40):
        lengths = np.exp(3 + 0.8 * rng.standard_normal(7)).astype(int).clip(1, 60).tolist()
        layout = BatchLayout(2, int(rng.integers(60, 120)), 4, sequence_alignment=2, cost=SequenceCost(1.0, 1 / 80))
        made = plan(lengths, layout)
        per_rank = len(made.ranks[0])
        if per_rank > 2:
            continue
        assert per_rank == 1 or all_placements(lengths, layout, 1) == math.inf
        ratios.append(made.slowest_cost / all_placements(lengths, layout, per_rank))
    assert len(ratios) > 30
    assert min(ratios) >= 1 - 1e-12 and max(ratios) <= 1.2 and np.mean(ratios) <= 1.03


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 30), st.sampled_from([40, 60, 61, 64])), min_size=1, max_size=60),
    st.sampled_from([1, 2, 8, 32]),
    st.integers(64, 300),
    st.sampled_from([(1, 1), (2, 1), (4, 4), (8, 2), (16, 4), (6, 3)]),
    st.integers(1, 3),
)
def test_properties(lengths: list[int], ranks: int, budget: int, alignments: tuple[int, int], multiple: int) -> None:
    """Each sequence once, equal counts in the multiple asked for, the budget kept, T no longer than its rows need,
    the stated cost true, costliest rows first, and the same again for the same input."""
    layout = BatchLayout(ranks, budget, *alignments, rows_multiple=multiple, cost=SequenceCost(1.0, 1 / 50))
    made = plan(lengths, layout)
    assert len(made.ranks) == ranks
    assert sorted(i for rank in made.ranks for row in rank for i in row) == list(range(len(lengths)))
    (per_rank,) = {len(rank) for rank in made.ranks}
    assert per_rank % multiple == 0
    assert made.row_tokens % alignments[0] == 0 and made.row_tokens <= layout.capacity_tokens
    extents = [math.ceil(length / alignments[1]) * alignments[1] for length in lengths]
    filled = [[sum(extents[i] for i in row) for row in rank] for rank in made.ranks]
    assert 0 <= made.row_tokens - max(max(rank) for rank in filled) < alignments[0]
    costs = [
        [
            made.row_tokens + (sum(extents[i] ** 2 for i in row) + (made.row_tokens - used) ** 2) / 50
            for row, used in zip(rank, fills, strict=True)
        ]
        for rank, fills in zip(made.ranks, filled, strict=True)
    ]
    assert made.slowest_cost == pytest.approx(max(sum(rank) for rank in costs))
    assert all(a >= b - 1e-9 for rank in costs for a, b in itertools.pairwise(rank))
    # Best fit leaves at most one row half empty or less, so no more rows than this are needed.
    needed = math.ceil(max(1, 2 * sum(extents) / layout.capacity_tokens) / (ranks * multiple)) * multiple
    assert per_rank <= max(multiple, needed)
    assert plan(lengths, layout) == made


def test_cost_of_a_decoder() -> None:
    """Llama-like, by hand: 2 FLOPs a weight; a causal sequence of 4 has 10 pairs, of which the formula counts 4^2 / 2:
    the triangle without half of its diagonal."""
    cost = SequenceCost.of_decoder(weights=1000, attention_width=6)
    assert (cost.linear, cost.quadratic) == (2000.0, 12.0)
    assert cost.quadratic * 4**2 == 2 * 2 * 6 * 8


def test_refusals() -> None:
    with pytest.raises(ValueError, match="alignment = 6 is not a multiple of sequence_alignment = 4"):
        BatchLayout(1, 16, 6, sequence_alignment=4)
    with pytest.raises(ValueError, match="expected linear > 0"):
        SequenceCost(0.0, 1.0)
