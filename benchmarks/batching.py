"""Measures the rows planned for one step's responses (padding, balance, time) beside a Karmarkar-Karp partition.

    python benchmarks/batching.py

Draws 4,096 lengths as long chain-of-thought responses have them (log-normal, prompt included, mean 8K after the cap at
32K) for several seeds and spreads, and plans them for 32 data-parallel ranks under several token budgets, in turn:

    ours        rl.packing.plan_rows: rows of one length T, the same number on every rank
    KK tokens   largest differencing (Karmarkar and Karp 1982) by tokens, as verl balances a batch: equal numbers of
                samples to every rank, then each rank's share into as many micro-batches as the fullest rank needs
    KK cost     the same by a * L + b * L^2 instead of tokens, as verl's newer versions do

A differencing partition keeps no token budget: its micro-batches are as equal as they come and of any length. They need
no padding where shapes may vary; where they may not, all are padded to the longest. All costs are those of a 7B Qwen2.
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from result import figure, write_result
from rich.console import Console
from rich.table import Table

from or1_megatron.rl.packing import QWEN2_7B, BatchLayout, Ints, plan_rows

RESPONSES, RANKS = 4096, 32
MEAN, CAP = 8192, 32768
SIGMAS = (0.8, 0.9, 1.0)
SEEDS = range(8)
BUDGETS = (65536, 49152, 32768)
ALIGNMENT, SEQUENCE_ALIGNMENT = 16, 4  # of TP 4 and CP 2: 2 * CP * TP and 2 * CP

Ranks = Sequence[Sequence[Sequence[int]]]  # per rank, per micro-batch, the samples in it


@dataclass(frozen=True)
class Outcome:
    """The result of one way to cut one draw. Costs are relative to one rank's even share without padding."""

    padding: float  # of all cells when all rows have one length, alignment included
    slowest: float  # costliest rank over the mean rank, minus 1, padding left out
    static: float  # costliest rank with rows of one length, padding computed
    varying: float  # costliest rank with rows of their own length, alignment included
    micro_batches: tuple[int, int]  # least and most that a rank's share needs under the budget
    row_tokens: int  # the longest row
    over_budget: float  # share of rows longer than the budget
    seconds: float


def location(sigma: float) -> float:
    """Return mu for which a log-normal capped at CAP has the mean MEAN, by bisection on its closed form."""

    def normal(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    def mean(mu: float) -> float:
        z = (math.log(CAP) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * normal(z - sigma) + CAP * (1 - normal(z))

    low, high = 0.0, math.log(CAP)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < MEAN else (low, middle)
    return low


def draw(sigma: float, seed: int) -> Ints:
    """Draw [RESPONSES] lengths."""
    normals = np.random.default_rng(seed).standard_normal(RESPONSES)
    return np.exp(location(sigma) + sigma * normals).clip(1, CAP).astype(np.int64)


def differencing(weights: Sequence[float], items: Sequence[int], parts: int, equal_size: bool) -> list[list[int]]:
    """Divide ``items`` into ``parts`` groups of similar weight, by the largest differencing method.

    A partial partition is one sum per group. The two whose sums differ most are merged, the heaviest group of one with
    the lightest of the other, until one is left. ``equal_size`` starts with the items in runs of ``parts`` by weight,
    one to each group, which keeps the groups' sizes equal; the number of items must be a multiple then.
    """
    order = sorted(items, key=lambda i: -weights[i])
    run = parts if equal_size else 1
    starts = [order[k : k + run] for k in range(0, len(order), run)]
    heap = []
    for number, members in enumerate(starts):
        groups = [(weights[i], [i]) for i in members] + [(0.0, [])] * (parts - len(members))
        heapq.heappush(heap, (groups[-1][0] - groups[0][0], number, groups))
    number = len(starts)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [members for _, members in heap[0][2]]


def by_differencing(lengths: Ints, weights: Ints, budget: int) -> tuple[Ranks, tuple[int, int]]:
    """Return (micro-batches of each rank, least and most that a rank's share needed)."""
    values = weights.tolist()
    shares = differencing(values, range(len(values)), RANKS, equal_size=True)
    counts = [math.ceil(int(lengths[share].sum()) / budget) for share in shares]
    rows = [differencing(values, share, max(counts), equal_size=False) for share in shares]
    return rows, (min(counts), max(counts))


def by_plan(lengths: Ints, budget: int) -> tuple[Ranks, tuple[int, int]]:
    found = plan_rows(lengths, BatchLayout(RANKS, budget, ALIGNMENT, SEQUENCE_ALIGNMENT)).ranks
    return found, (len(found[0]), len(found[0]))


def aligned(tokens: Ints, to: int) -> Ints:
    return -(-tokens // to) * to


def measure(cut: Callable[[], tuple[Ranks, tuple[int, int]]], lengths: Ints, budget: int) -> Outcome:
    """Run ``cut`` and compute the outcome, only from where it puts each sample."""
    started_s = time.perf_counter()
    ranks, micro_batches = cut()
    seconds = time.perf_counter() - started_s
    placed = sorted(i for rank in ranks for row in rank for i in row)
    if placed != list(range(len(lengths))):
        raise AssertionError("a sample is missing or lies in two rows")
    a, b = QWEN2_7B.linear, QWEN2_7B.quadratic
    extents = aligned(lengths, SEQUENCE_ALIGNMENT)
    filled = np.array([[extents[list(row)].sum() for row in rank] for rank in ranks])  # [DP, R]
    squares = np.array([[np.square(extents[list(row)], dtype=float).sum() for row in rank] for rank in ranks])
    own, longest = aligned(filled, ALIGNMENT), int(aligned(filled.max(), ALIGNMENT))
    real = a * lengths + b * np.square(lengths, dtype=float)
    costs = np.array([sum(real[list(row)].sum() for row in rank) for rank in ranks])
    return Outcome(
        padding=1 - int(lengths.sum()) / (filled.size * longest),
        slowest=float(costs.max() / costs.mean() - 1),
        static=float((a * longest + b * (squares + (longest - filled) ** 2)).sum(axis=1).max() / costs.mean()),
        varying=float((a * own + b * (squares + (own - filled) ** 2)).sum(axis=1).max() / costs.mean()),
        micro_batches=micro_batches,
        row_tokens=longest,
        over_budget=float((own > budget).mean()),
        seconds=seconds,
    )


def least_padding(lengths: Ints, budget: int) -> float:
    """Return the least padding of any plan with rows of one length under ``budget`` that hold the longest sample."""
    extents = aligned(lengths, SEQUENCE_ALIGNMENT)
    per_rank = math.ceil(int(extents.sum()) / (RANKS * budget))
    row_tokens = max(int(extents.max()), math.ceil(int(extents.sum()) / (RANKS * per_rank)))
    return 1 - int(lengths.sum()) / (RANKS * per_rank * int(aligned(np.int64(row_tokens), ALIGNMENT)))


def table(budget: int, outcomes: dict[str, list[Outcome]]) -> Table:
    shown = Table(title=f"rows of at most {budget:,} tokens: worst of {len(outcomes['ours'])} draws (time: median)")
    shown.add_column("")
    for name in outcomes:
        shown.add_column(name, justify="right")
    for label, of in (
        ("slowest rank above the mean", lambda found: f"{max(o.slowest for o in found):.2%}"),
        ("padding, rows of one length", lambda found: f"{max(o.padding for o in found):.2%}"),
        ("slowest rank, rows of one length", lambda found: f"{max(o.static for o in found):.4f}"),
        ("slowest rank, rows of their own length", lambda found: f"{max(o.varying for o in found):.4f}"),
        ("micro-batches a rank asks for", lambda found: _range([n for o in found for n in o.micro_batches])),
        (
            "  widest spread within a draw",
            lambda found: str(max(o.micro_batches[1] - o.micro_batches[0] for o in found)),
        ),
        ("longest row, tokens", lambda found: f"{max(o.row_tokens for o in found):,}"),
        ("rows above the budget", lambda found: f"{max(o.over_budget for o in found):.1%}"),
        ("planned in", lambda found: f"{statistics.median(o.seconds for o in found) * 1000:.0f} ms"),
    ):
        shown.add_row(label, *(of(found) for found in outcomes.values()))
    return shown


def _range(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else str(values[0])


def compare(lengths: Ints, budget: int) -> dict[str, Outcome]:
    """Measure the three ways on one draw, in turn."""
    costs = np.rint(lengths * (QWEN2_7B.linear / QWEN2_7B.quadratic) + np.square(lengths)).astype(np.int64)
    return {
        "ours": measure(lambda: by_plan(lengths, budget), lengths, budget),
        "KK tokens": measure(lambda: by_differencing(lengths, lengths, budget), lengths, budget),
        "KK cost": measure(lambda: by_differencing(lengths, costs, budget), lengths, budget),
    }


def figures_of(name: str, found: Sequence[Outcome]) -> dict[str, Any]:
    """Return the worst of all draws, with the limits for our way."""
    ours = name == "ours"
    return {
        "padding": figure(max(o.padding for o in found), "share", at_most=0.02 if ours else None),
        "slowest rank above the mean": figure(max(o.slowest for o in found), "share", at_most=0.03 if ours else None),
        "slowest rank over an even share, rows of one length": figure(max(o.static for o in found)),
        "slowest rank over an even share, rows of any length": figure(max(o.varying for o in found)),
        "spread of micro-batches over ranks": figure(max(o.micro_batches[1] - o.micro_batches[0] for o in found)),
        "rows above the budget": figure(max(o.over_budget for o in found), "share"),
        "planned in": figure(max(o.seconds for o in found), "s", at_most=1.0 if ours else None),
    }


def main() -> None:
    draws = [draw(sigma, seed) for sigma in SIGMAS for seed in SEEDS]
    console = Console(width=110)
    figures = {}
    for budget in BUDGETS:
        compared = [compare(lengths, budget) for lengths in draws]
        outcomes = {name: [each[name] for each in compared] for name in compared[0]}
        least = max(least_padding(lengths, budget) for lengths in draws)
        kept = sum(o.padding <= 0.02 for o in outcomes["ours"])
        console.print(table(budget, outcomes))
        console.print(
            f"padding at most 2% in {kept} of {len(draws)} draws; the worst allows no less than {least:.2%}\n"
        )
        rows = f"rows of {budget // 1024}K"
        for name, found in outcomes.items():
            figures |= {f"{rows}, {name}: {label}": value for label, value in figures_of(name, found).items()}
        figures[f"{rows}: least padding that any plan can have"] = figure(least, "share")
        figures[f"{rows}, ours: draws with at most 2% of padding"] = figure(f"{kept} of {len(draws)}")
    settings = {
        "responses": RESPONSES, "data-parallel ranks": RANKS, "mean length": MEAN, "longest": CAP, "sigma": SIGMAS,
        "draws per sigma": len(SEEDS), "row alignment": ALIGNMENT, "sequence alignment": SEQUENCE_ALIGNMENT,
        "cost": "7B Qwen2: attention as dear as all else at 70K tokens", "cores": 1, "shown": "worst draw",
    }  # fmt: skip
    console.print(f"written to {write_result('batching', figures, settings)}")


if __name__ == "__main__":
    main()
