"""Moves this rank's part of a micro-batch to the device; gathers scores from the context-parallel ranks.

Shapes: T packed tokens of a row, of which t = T / CP are on this rank; C counted tokens, of which c are on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from or1_megatron.interfaces import Sequences, TokenInputs
from or1_megatron.parallel.packed import PackedRow, pack_row
from or1_megatron.types import MicroBatch


@dataclass(frozen=True)
class DeviceRow:
    """This rank's part of a micro-batch, as tensors on the training device."""

    row_tokens: int
    """T: packed tokens of the whole row."""
    token_ids: Tensor  # [t]
    row: PackedRow
    counted: Tensor  # [c] indices of the counted tokens among this rank's t
    counted_in_row: Tensor  # [C] row positions of the whole row's counted tokens
    targets: Tensor  # [c]
    inputs: TokenInputs  # [c], without sequences
    sequences: Sequences  # of the c tokens


def _add_context_ranks(values: Tensor) -> Tensor:
    """Sum values over the context-parallel ranks, which hold parts of the same sequences.

    The backward pass sums the gradients over these ranks too, because each rank's loss depends on the total.
    """
    total: Tensor = all_reduce(values, "sum", parallel_state.get_context_parallel_group())
    return total


def to_device(micro_batch: MicroBatch, device: torch.device, context_rank: int = 0, context: int = 1) -> DeviceRow:
    """Move this rank's part of a micro-batch to ``device``. The loss's per-token inputs keep only counted tokens."""
    row = pack_row(
        torch.from_numpy(micro_batch.cu_seqlens),
        torch.from_numpy(micro_batch.position_ids).to(device),
        context_rank,
        context,
    )
    if micro_batch.own_experts is not None:
        row.experts, row.counted = (torch.from_numpy(array).to(device) for array in micro_batch.own_experts)
    counted_in_row = torch.from_numpy(micro_batch.loss_mask).nonzero(as_tuple=True)[0]
    held = torch.arange(micro_batch.token_ids.size) if row.shard is None else row.shard.held.cpu()
    counted = torch.from_numpy(micro_batch.loss_mask)[held].nonzero(as_tuple=True)[0]

    def pick(array: Any) -> Any:
        return None if array is None else torch.from_numpy(array)[held[counted]].to(device)

    bounds = torch.from_numpy(micro_batch.cu_seqlens[: len(micro_batch.sample_index) + 1]).long()
    of_row = torch.searchsorted(bounds, counted_in_row, right=True) - 1
    sequences = Sequences(
        index=(torch.searchsorted(bounds, held[counted], right=True) - 1).to(device),
        lengths=torch.bincount(of_row, minlength=len(micro_batch.sample_index)).to(device),
        add_ranks=_add_context_ranks if context > 1 else None,
    )

    return DeviceRow(
        row_tokens=micro_batch.token_ids.size,
        token_ids=torch.from_numpy(micro_batch.token_ids)[held].to(device),
        row=row,
        counted=counted.to(device),
        counted_in_row=counted_in_row.to(device),
        targets=pick(micro_batch.target_ids),
        inputs=TokenInputs(
            advantages=pick(micro_batch.advantages),
            engine_log_probs=pick(micro_batch.engine_log_probs),
            policy_log_probs=pick(micro_batch.policy_log_probs),
            reference_log_probs=pick(micro_batch.reference_log_probs),
            weights=pick(micro_batch.weights),
            log_prob_gradients=pick(micro_batch.log_prob_gradients),
            entropy_gradients=pick(micro_batch.entropy_gradients),
        ),
        sequences=sequences,
    )


def gather_counted(row: DeviceRow, scored: Tensor) -> Tensor:
    """Gather the scores [2, c] of all context-parallel ranks; return the whole row's scores [2, C] on the CPU."""
    if row.row.shard is not None:
        of_row = scored.new_zeros(2, row.row_tokens)
        of_row[:, row.row.shard.held[row.counted]] = scored
        dist.all_reduce(of_row, group=parallel_state.get_context_parallel_group())
        scored = of_row[:, row.counted_in_row]
    return scored.cpu()
