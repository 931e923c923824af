"""Samples to packed micro-batches, for every data-parallel rank (RECIPE section 1: mini-batches and T_k).

Worked example of one row: prompt (5, 6), response (7, 8), advantage 0.5, engine log-probs (-1, -2), padded to T = 6:

    position       0    1    2    3  |  4    5     cu_seqlens (0, 4, 6)
    token_ids      5    6    7    8  |  0    0
    target_ids     6    7    8    0  |  0    0     position t predicts token t+1
    counted        .    x    x    .  |  .    .     the last prompt position predicts the first response token
    advantages     0   .5   .5    0  |  0    0     the last position predicts nothing
    old_log_probs  0   -1   -2    0  |  0    0

Shapes: p prompt tokens, n response tokens, L = p + n, T tokens of a row, S sequences of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from or1_megatron.types import AdvantagedGroup, Batch, Float32Array, MicroBatch, Sample

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How rows are cut: for how many data-parallel ranks, how long, in multiples of what."""

    data_ranks: int
    budget_tokens: int
    """A row holds at most this many tokens (rounded up to ``alignment``)."""
    alignment: int
    """T is a multiple of it: 2 * CP * TP."""
    quadratic_tokens: float = 65536.0
    """The sequence length at which attention costs as much as all linear layers: the cost of a sequence is taken as
    L + L^2 / quadratic_tokens. 64K is that of a 7B Qwen2: 2 * 6.5e9 FLOPs per token against 2 * 28 * 3584 * L of causal
    attention (a larger model: longer). It steers the balance only, never the result."""

    @property
    def capacity_tokens(self) -> int:
        return -(-self.budget_tokens // self.alignment) * self.alignment


def to_samples(group: AdvantagedGroup) -> list[Sample]:
    """The group's responses, in order, as the policy trains on them; ``old_log_probs`` are the engines'.

    Every response token is counted, those of truncated responses too, under every truncation mask (eq. 3.1 as written).
    """
    return [
        Sample(
            prompt_ids=group.group.prompt.token_ids,
            response_ids=completion.token_ids,
            old_log_probs=completion.log_probs,
            advantage=float(advantage),
            loss_mask=np.ones(completion.token_ids.size, dtype=np.bool_),
        )
        for completion, advantage in zip(group.group.completions, group.advantages, strict=True)
    ]


def split(groups: Sequence[Item], mini_batches: int) -> list[list[Item]]:
    """Whole groups into exactly ``mini_batches`` (D_R / D_T) runs of neighbours, as equal as can be, larger ones first.

    Fewer groups than that: one per mini-batch; none: no mini-batch. 7 groups into 3: 3, 2, 2.
    """
    parts = min(mini_batches, len(groups))
    if parts == 0:
        return []
    size, larger = divmod(len(groups), parts)
    ends = np.cumsum([size + (i < larger) for i in range(parts)])
    return [list(groups[end - size - (i < larger) : end]) for i, end in enumerate(ends)]


def make_batches(groups: Sequence[Sequence[Sample]], mini_batches: int, reuse: int, layout: BatchLayout) -> list[Batch]:
    """One Batch per SGD step: the groups' samples in mini-batches, ``reuse`` passes over them in the same order."""
    once = [pack([sample for group in part for sample in group], layout) for part in split(groups, mini_batches)]
    return once * reuse


def pack(samples: Sequence[Sample], layout: BatchLayout) -> Batch:
    """All samples as rows of one length T for every rank; none is dropped and none is cut.

    As few rows as hold them, the same number for every rank, balanced by cost over rows and ranks, costliest rows
    first; a rank for which no sample is left gets rows of padding alone. Deterministic.
    Raises ValueError when there is nothing to count, a prompt is empty, or a sample is longer than the budget.
    """
    lengths = np.array([sample.prompt_ids.size + sample.response_ids.size for sample in samples], dtype=np.int64)
    _check(samples, lengths, layout)
    rows, loads = _distribute(lengths, layout)
    longest = max(int(lengths[row].sum()) for row in rows)
    row_tokens = -(-longest // layout.alignment) * layout.alignment
    ranks = tuple(
        tuple(_fill(samples, rows[row], row_tokens) for row in members) for members in _deal(loads, layout.data_ranks)
    )
    return Batch(ranks, token_count=sum(int(sample.loss_mask.sum()) for sample in samples), sample_count=len(samples))


def real_tokens(batch: Batch) -> int:
    """Prompt and response tokens of a batch, padding left out."""
    return sum(int(row.cu_seqlens[row.sample_index.size]) for rank in batch.ranks for row in rank)


def check_log_probs(samples: Sequence[Sample], log_probs: Sequence[Float32Array]) -> None:
    """Raise ValueError unless there is one log-prob for every response token of every sample."""
    expected, found = [sample.response_ids.size for sample in samples], [array.size for array in log_probs]
    if expected != found:
        raise ValueError(f"policy.score returned {found[:8]}... log-probs per sample, expected {expected[:8]}...")


def _check(samples: Sequence[Sample], lengths: NDArray[np.int64], layout: BatchLayout) -> None:
    if not any(sample.loss_mask.any() for sample in samples):
        raise ValueError(
            f"pack: the {len(samples)} samples hold no counted token: there is nothing to divide the loss by"
        )
    for i, sample in enumerate(samples):
        if sample.prompt_ids.size == 0:
            raise ValueError(f"pack: sample {i} has an empty prompt; nothing predicts its first response token")
    if lengths.max() > layout.capacity_tokens:
        raise ValueError(
            f"pack: sample {int(lengths.argmax())} has {lengths.max()} tokens (prompt + response), more than the "
            f"row's budget of {layout.budget_tokens}; raise parallel.micro_batch_tokens"
        )


def _distribute(lengths: NDArray[np.int64], layout: BatchLayout) -> tuple[list[list[int]], NDArray[np.float64]]:
    """(sample indices of each row, cost of each row): the smallest number of rows, in multiples of the ranks, found.

    Longest first, each into the cheapest row that has room (the LPT rule); where that ends in a dead end, each into the
    fullest row that has room (best fit packs tighter); else one more row per rank. Ends at one sample per row.
    """
    costs = lengths + np.square(lengths, dtype=np.float64) / layout.quadratic_tokens
    order = np.argsort(-lengths, kind="stable")
    per_rank = max(1, -(-int(lengths.sum()) // (layout.capacity_tokens * layout.data_ranks)))
    while True:
        for balanced in (True, False):
            count = per_rank * layout.data_ranks
            rows: list[list[int]] = [[] for _ in range(count)]
            fill, loads = np.zeros(count, dtype=np.int64), np.zeros(count)
            for i in order:
                room = fill + lengths[i] <= layout.capacity_tokens
                if not room.any():
                    break
                row = int(np.where(room, loads if balanced else -fill, np.inf).argmin())
                rows[row].append(int(i))
                fill[row] += lengths[i]
                loads[row] += costs[i]
            else:
                return rows, loads
        per_rank += 1


def _deal(loads: NDArray[np.float64], ranks: int) -> list[list[int]]:
    """Rows to ranks, the same number to each: costliest first, each to the least loaded rank that has a place left."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    of_rank = np.zeros(ranks)
    for row in np.argsort(-loads, kind="stable"):
        full = np.array([len(rows) == loads.size // ranks for rows in dealt])
        rank = int(np.where(full, np.inf, of_rank).argmin())
        dealt[rank].append(int(row))
        of_rank[rank] += loads[row]
    return dealt


def _fill(samples: Sequence[Sample], members: Sequence[int], row_tokens: int) -> MicroBatch:
    """One row (see the module's example). Padding is token 0 in a last sequence of its own, positions from 0."""
    token_ids, target_ids, position_ids = (np.zeros(row_tokens, dtype=np.int64) for _ in range(3))
    counted = np.zeros(row_tokens, dtype=np.bool_)
    advantages, old_log_probs = (np.zeros(row_tokens, dtype=np.float32) for _ in range(2))
    bounds = [0]
    for i in members:
        sample, start = samples[i], bounds[-1]
        first = start + sample.prompt_ids.size  # of the response
        end = first + sample.response_ids.size
        token_ids[start:first], token_ids[first:end] = sample.prompt_ids, sample.response_ids
        target_ids[start : end - 1] = token_ids[start + 1 : end]
        position_ids[start:end] = np.arange(end - start)
        predicting = slice(first - 1, end - 1)
        counted[predicting] = sample.loss_mask
        advantages[predicting] = sample.advantage
        old_log_probs[predicting] = sample.old_log_probs
        bounds.append(end)
    if bounds[-1] < row_tokens:
        position_ids[bounds[-1] :] = np.arange(row_tokens - bounds[-1])
        bounds.append(row_tokens)
    return MicroBatch(
        token_ids=token_ids,
        target_ids=target_ids,
        position_ids=position_ids,
        cu_seqlens=np.array(bounds, dtype=np.int32),
        counted=counted,
        advantages=advantages,
        old_log_probs=old_log_probs,
        sample_index=np.array(members, dtype=np.int32),
    )
