"""Splits groups into mini-batches and fills their packed rows for every data-parallel rank (RECIPE section 1).

Worked example of one row: prompt (5, 6), response (7, 8), advantage 0.5, engine log-probs (-1, -2), padded to T = 6:

    position          0    1    2    3  |  4    5     cu_seqlens (0, 4, 6)
    token_ids         5    6    7    8  |  0    0
    target_ids        6    7    8    0  |  0    0     position t predicts token t+1
    loss_mask         .    x    x    .  |  .    .     the last prompt position predicts the first response token
    advantages        0   .5   .5    0  |  0    0     the last position predicts nothing
    engine_log_probs  0   -1   -2    0  |  0    0     policy_log_probs and reference_log_probs likewise

With ``sequence_alignment`` 3 the sequence extends to 6 (cu_seqlens (0, 6)) and its padding has positions 4 and 5. Its
``lengths`` entry is 4 with and without alignment. ``rl.packing`` plans which sample goes to which packed row.

Shapes: p prompt tokens, n response tokens, L = p + n, T tokens of a row, S sequences of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from or1_megatron.rl.aggregation import weigh
from or1_megatron.rl.packing import BatchLayout, plan_rows
from or1_megatron.types import (
    AdvantagedGroup,
    Aggregation,
    Batch,
    Float32Array,
    MicroBatch,
    RoutedExperts,
    Sample,
)

LOG_PROBS: Final = ("engine_log_probs", "policy_log_probs", "reference_log_probs")
"""Optional fields of a sample. A field is set in all samples of a batch or in none."""


def to_samples(group: AdvantagedGroup) -> list[Sample]:
    """Return the responses of the group, in order, as training samples.

    Every response token enters the loss, also in truncated responses and under every truncation mask (as in eq. 3.1).
    """
    return [
        Sample(
            prompt_ids=group.group.prompt.token_ids,
            response_ids=completion.token_ids,
            advantage=float(advantage),
            loss_mask=np.ones(completion.token_ids.size, dtype=np.bool_),
            engine_log_probs=completion.log_probs,
            routed_experts=completion.routed_experts,
        )
        for completion, advantage in zip(group.group.completions, group.advantages, strict=True)
    ]


def split[Item](groups: Sequence[Item], mini_batches: int) -> list[list[Item]]:
    """Split whole groups, in order, into ``mini_batches`` parts of nearly equal size, larger parts first.

    The parts are the D_R / D_T mini-batches of RECIPE section 1, after rejection and refill (``rl.supply``). 7 groups
    in 3 mini-batches give 3, 2 and 2 groups. Fewer groups than mini-batches give one mini-batch per group.
    """
    parts = min(mini_batches, len(groups))
    if parts == 0:
        return []
    size, larger = divmod(len(groups), parts)
    ends = np.cumsum([size + (i < larger) for i in range(parts)])
    return [list(groups[end - size - (i < larger) : end]) for i, end in enumerate(ends)]


def make_batches(
    groups: Sequence[Sequence[Sample]],
    mini_batches: int,
    reuse: int,
    layout: BatchLayout,
    aggregation: Aggregation,
    max_response_tokens: int,
) -> list[Batch]:
    """Return one packed batch per SGD step: the list of all mini-batches in order, repeated ``reuse`` times."""
    parts = [[sample for group in part for sample in group] for part in split(groups, mini_batches)]
    return [pack(weigh(part, aggregation, max_response_tokens), layout) for part in parts] * reuse


def pack(samples: Sequence[Sample], layout: BatchLayout) -> Batch:
    """Pack all samples into rows of one length T, for every data-parallel rank; no sample is dropped or cut.

    Every rank gets the same, smallest possible number of rows, balanced by cost and sorted with the costliest first.
    Some rows may be all padding. The result is deterministic.

    Raises ValueError when no token is counted, a prompt is empty, or a sample is longer than a row's budget.
    """
    lengths = np.array([sample.prompt_ids.size + sample.response_ids.size for sample in samples], dtype=np.int64)
    _check(samples, lengths, layout)
    plan = plan_rows(lengths, layout)
    ranks = tuple(
        tuple(_fill(samples, row, plan.row_tokens, layout.sequence_alignment) for row in rows) for rows in plan.ranks
    )
    counted = sum(int(sample.loss_mask.sum()) for sample in samples)
    return Batch(ranks, token_count=counted, samples=tuple(samples))


def real_tokens(batch: Batch) -> int:
    """Count the prompt and response tokens of a batch, without padding."""
    return sum(int(row.lengths.sum()) for rank in batch.ranks for row in rank)


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
    for name in (*LOG_PROBS, "weight", "routed_experts"):
        having = sum(getattr(sample, name) is not None for sample in samples)
        if having not in (0, len(samples)):
            raise ValueError(f"pack: {having} of {len(samples)} samples have {name}; expected all or none")
    for i, sample in enumerate(samples):
        if sample.prompt_ids.size == 0:
            raise ValueError(f"pack: sample {i} has an empty prompt; nothing predicts its first response token")
    if lengths.max() > layout.capacity_tokens:
        raise ValueError(
            f"pack: sample {int(lengths.argmax())} has {lengths.max()} tokens (prompt + response), more than the "
            f"row's budget of {layout.capacity_tokens}; raise parallel.micro_batch_tokens"
        )


def _fill(
    samples: Sequence[Sample],
    members: Sequence[int],
    row_tokens: int,
    sequence_alignment: int,
) -> MicroBatch:
    """Return one packed row with the samples ``members`` (see the module's example).

    Padding is token 0. Padding at the end of a sequence continues the sequence's positions. Padding at the end of the
    row is a sequence of its own, with positions from 0.
    """
    token_ids, target_ids, position_ids = (np.zeros(row_tokens, dtype=np.int64) for _ in range(3))
    loss_mask = np.zeros(row_tokens, dtype=np.bool_)
    advantages = np.zeros(row_tokens, dtype=np.float32)
    weights = None if samples[0].weight is None else np.zeros(row_tokens, dtype=np.float32)
    given = [name for name in LOG_PROBS if getattr(samples[0], name) is not None]
    log_probs: dict[str, Any] = {name: np.zeros(row_tokens, dtype=np.float32) for name in given}
    bounds, lengths = [0], []
    routed: list[RoutedExperts] = []
    for i in members:
        sample, start = samples[i], bounds[-1]
        first = start + sample.prompt_ids.size  # where the response begins
        end = first + sample.response_ids.size
        token_ids[start:first], token_ids[first:end] = sample.prompt_ids, sample.response_ids
        target_ids[start : end - 1] = token_ids[start + 1 : end]
        predicting = slice(first - 1, end - 1)
        loss_mask[predicting] = sample.loss_mask
        advantages[predicting] = sample.advantage
        for name, of_row in log_probs.items():
            of_row[predicting] = getattr(sample, name)
        if weights is not None:
            weights[predicting] = sample.weight
        lengths.append(end - start)
        if sample.routed_experts is not None:
            routed.append(sample.routed_experts)
        bounds.append(start + -(-(end - start) // sequence_alignment) * sequence_alignment)
        position_ids[start : bounds[-1]] = np.arange(bounds[-1] - start)
    if bounds[-1] < row_tokens:
        position_ids[bounds[-1] :] = np.arange(row_tokens - bounds[-1])
        bounds.append(row_tokens)
    return MicroBatch(
        token_ids=token_ids,
        target_ids=target_ids,
        position_ids=position_ids,
        cu_seqlens=np.array(bounds, dtype=np.int32),
        loss_mask=loss_mask,
        advantages=advantages,
        sample_index=np.array(members, dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        weights=weights,
        routed_experts=None if samples[0].routed_experts is None else tuple(routed),
        **log_probs,
    )
