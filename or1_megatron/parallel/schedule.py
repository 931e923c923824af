"""One pass of a list of micro-batches through all pipeline stages, by Megatron's own schedules.

Shapes: T packed tokens of a row (the same for every row of a batch), C counted tokens among them, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from or1_megatron.interfaces import Objective
from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies
from or1_megatron.parallel.model import PolicyModel
from or1_megatron.parallel.packed import PackedRow, pack_row
from or1_megatron.types import MicroBatch


@dataclass(frozen=True)
class DeviceRow:
    """A micro-batch as tensors on the training device."""

    token_ids: Tensor  # [T]
    row: PackedRow
    counted: Tensor  # [C] row positions of counted tokens
    targets: Tensor  # [C]
    advantages: Tensor  # [C]
    old_log_probs: Tensor  # [C]


def to_device(micro_batch: MicroBatch, device: torch.device) -> DeviceRow:
    """Move one micro-batch; only counted positions are kept of the per-token arrays."""
    counted = torch.from_numpy(micro_batch.counted).nonzero(as_tuple=True)[0]

    def pick(array: Any) -> Tensor:
        return torch.from_numpy(array)[counted].to(device)

    return DeviceRow(
        token_ids=torch.from_numpy(micro_batch.token_ids).to(device),
        row=pack_row(torch.from_numpy(micro_batch.cu_seqlens), torch.from_numpy(micro_batch.position_ids).to(device)),
        counted=counted.to(device),
        targets=pick(micro_batch.target_ids),
        advantages=pick(micro_batch.advantages),
        old_log_probs=pick(micro_batch.old_log_probs),
    )


def _head(model: PolicyModel, hidden: Tensor, row: DeviceRow, temperature: float) -> tuple[Tensor, Tensor]:
    """Last stage: hidden [T, 1, H] (T/TP under sequence parallelism) to (log-probs, entropies) [C] fp32."""
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    weight = model.head_weight()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    shard = VocabularyShard(
        first_row=parallel_state.get_tensor_model_parallel_rank() * weight.shape[0],
        true_vocab_size=model.true_vocab_size,
        group=parallel_state.get_tensor_model_parallel_group() if ranks > 1 else None,
    )
    return log_probs_and_entropies(hidden[:, 0].index_select(0, row.counted), weight, row.targets, temperature, shard)


def _objective_loss(
    row: DeviceRow, model: PolicyModel, objective: Objective, hidden: Tensor
) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    log_probs, entropies = _head(model, hidden, row, objective.temperature)
    loss, sums = objective(log_probs, entropies, row.old_log_probs, row.advantages)
    return loss, torch.tensor(len(row.counted), dtype=torch.int), {"loss": loss.detach(), **sums}


def _scores(row: DeviceRow, model: PolicyModel, temperature: float, hidden: Tensor, non_loss_data: bool) -> Any:
    log_probs, entropies = _head(model, hidden, row, temperature)
    return log_probs.cpu(), entropies.cpu()


def _module(model: Any) -> PolicyModel:
    while not isinstance(model, PolicyModel):
        model = model.module
    return model


def _run(chunks: list[DistributedDataParallel], rows: Sequence[DeviceRow], loss: Any, forward_only: bool) -> list[Any]:
    def forward_step(rows_left: Any, model: Any) -> tuple[Tensor, Any]:
        row = next(rows_left)
        return model(row.token_ids[None], row.row), partial(loss, row, _module(model))

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(rows) if len(chunks) == 1 else [iter(rows) for _ in chunks],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(rows),
        seq_length=len(rows[0].token_ids),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def forward_backward(
    chunks: list[DistributedDataParallel], rows: Sequence[DeviceRow], objective: Objective
) -> list[Mapping[str, Tensor]]:
    """Accumulate the gradient of the objective's global token mean; its sums per micro-batch on the last stage."""

    def loss(row: DeviceRow, model: PolicyModel, hidden: Tensor) -> Any:
        return _objective_loss(row, model, objective, hidden)

    return _run(chunks, rows, loss, forward_only=False)


@torch.no_grad()
def forward(
    chunks: list[DistributedDataParallel], rows: Sequence[DeviceRow], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """(log-probs, entropies) [C] of every micro-batch, on the last stage; empty elsewhere."""

    def scores(row: DeviceRow, model: PolicyModel, hidden: Tensor, non_loss_data: bool) -> Any:
        return _scores(row, model, temperature, hidden, non_loss_data)

    return _run(chunks, rows, scores, forward_only=True)
