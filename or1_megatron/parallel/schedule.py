"""Runs micro-batches through the pipeline by Megatron's schedules; computes losses and scores with the fused head.

Megatron divides gradients by the token count T_k.

Shapes: T packed tokens of a row (equal in all packed rows of a batch), t = T / CP of them on this rank, C counted
tokens of the row, c of them on this rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from or1_megatron.interfaces import Objective, Sequences, TokenInputs, scope_of
from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies, one_pass_loss
from or1_megatron.parallel.model import PolicyModel
from or1_megatron.parallel.packed import PackedRow, pack_row
from or1_megatron.rl.objectives.whole_batch import needs_scores
from or1_megatron.runtime.timeline import span
from or1_megatron.types import MicroBatch


@dataclass(frozen=True)
class DeviceRow:
    """A micro-batch as tensors on the training device."""

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
    """Sum over the context-parallel ranks, which hold parts of the same sequences. The backward pass sums the gradients
    over these ranks, because each rank's loss depends on the total."""
    total: Tensor = all_reduce(values, "sum", parallel_state.get_context_parallel_group())
    return total


def to_device(micro_batch: MicroBatch, device: torch.device, context_rank: int = 0, context: int = 1) -> DeviceRow:
    """Move this rank's part of a micro-batch to ``device``; per-token inputs of the loss keep counted tokens only."""
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


def _head_input(model: PolicyModel, hidden: Tensor, row: DeviceRow) -> tuple[Tensor, Tensor, VocabularyShard]:
    """Return (hidden [c, H] of the counted tokens, output weight, the rank's vocabulary shard). Last stage only.

    ``hidden``: [t, 1, H]; under sequence parallelism, t / TP.
    """
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
    return hidden[:, 0].index_select(0, row.counted), weight, shard


def _objective_loss(
    objective: Objective, one_pass: bool, row: DeviceRow, model: PolicyModel, hidden: Tensor
) -> tuple[Tensor, Tensor, tuple[Mapping[str, Tensor], Tensor]]:
    """Compute (loss, token count, (named sums, log-probs and entropies [2, c])) of one micro-batch.

    Megatron's schedules expect this form from the last stage.

    Raises:
        ValueError: the objective needs scores first; ``rl.objectives.whole_batch`` must evaluate it before the update.
    """
    if needs_scores(objective, one_pass):
        raise ValueError(
            f"{type(objective).__name__} has the scope '{scope_of(objective)}', which this head cannot give; evaluate "
            "it before the update (rl.objectives.whole_batch)"
        )
    seen: list[Tensor] = []
    inputs = replace(row.inputs, sequences=row.sequences) if scope_of(objective) == "sequence" else row.inputs

    def pointwise(log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
        seen.append(torch.stack((log_probs.detach(), entropies.detach())))
        return objective(log_probs, entropies, inputs if part == slice(None) else inputs[part])

    sums: Mapping[str, Tensor]
    counted, weight, shard = _head_input(model, hidden, row)
    if one_pass:
        loss, sums = one_pass_loss(counted, weight, row.targets, objective.temperature, shard, pointwise)
    else:
        scored = log_probs_and_entropies(counted, weight, row.targets, objective.temperature, shard)
        loss, sums = pointwise(*scored, slice(None))
    reported = {"loss": loss.detach(), **sums}, torch.cat(seen, dim=1)
    return loss, torch.tensor(len(row.counted), dtype=torch.int), reported


def _of_whole_row(row: DeviceRow, scored: Tensor) -> Tensor:
    """Gather the context-parallel ranks' scores [2, c] into [2, C] on the CPU; collective over these ranks."""
    if row.row.shard is not None:
        of_row = scored.new_zeros(2, row.row_tokens)
        of_row[:, row.row.shard.held[row.counted]] = scored
        dist.all_reduce(of_row, group=parallel_state.get_context_parallel_group())
        scored = of_row[:, row.counted_in_row]
    return scored.cpu()


def _scores(temperature: float, row: DeviceRow, model: PolicyModel, hidden: Tensor, non_loss_data: bool) -> Tensor:
    """Compute log-probs and entropies [2, C] of one micro-batch, on the CPU of every context-parallel rank."""
    counted, weight, shard = _head_input(model, hidden, row)
    return _of_whole_row(row, torch.stack(log_probs_and_entropies(counted, weight, row.targets, temperature, shard)))


def _module(model: Any) -> PolicyModel:
    while not isinstance(model, PolicyModel):
        model = model.module
    return model


def _run(chunks: Sequence[torch.nn.Module], rows: Sequence[DeviceRow], loss: Any, forward_only: bool) -> list[Any]:
    def forward_step(rows_left: Any, chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        row = next(rows_left)
        return chunk(row.token_ids[None], row.row), partial(loss, row, _module(chunk))

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(rows) if len(chunks) == 1 else [iter(rows) for _ in chunks],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(rows),
        seq_length=rows[0].row_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def forward_backward(
    chunks: Sequence[DistributedDataParallel], rows: Sequence[DeviceRow], objective: Objective, one_pass: bool = False
) -> list[tuple[Mapping[str, Tensor], Tensor]]:
    """Add the gradient of the objective's mean over all ranks' counted tokens to the gradient buffers.

    Megatron divides by the number of these tokens (``calculate_per_token_loss``). On the last stage return, per
    micro-batch, (the objective's sums, log-probs and entropies [2, C]); elsewhere return [].
    """
    outputs = _run(chunks, rows, partial(_objective_loss, objective, one_pass), forward_only=False)
    return [(sums, _of_whole_row(row, scored)) for row, (sums, scored) in zip(rows, outputs, strict=bool(outputs))]


@torch.no_grad()
def forward(chunks: Sequence[torch.nn.Module], rows: Sequence[DeviceRow], temperature: float) -> list[Tensor]:
    """Return log-probs and entropies [2, C] of every micro-batch, on the last stage; an empty list elsewhere."""
    return _run(chunks, rows, partial(_scores, temperature), forward_only=True)


def time_schedules(stage: int, stages: int) -> None:
    """Let schedules record spans of micro-batches and, without interleaving, of exchanges between pipeline stages."""
    for name in ("forward_step", "backward_step"):
        setattr(schedules, name, _timed(getattr(schedules, name), stage=stage))
    to_before = dict.fromkeys(("recv_forward", "send_backward", "send_backward_recv_forward"), stage - 1)
    to_next = dict.fromkeys(("send_forward", "recv_backward", "send_forward_recv_backward"), stage + 1)
    for name, peer in (to_before | to_next).items():
        if 0 <= peer < stages:
            setattr(P2PCommunicator, name, _timed(getattr(P2PCommunicator, name), waits_for=f"stage {peer}"))


def _timed(inner: Callable[..., Any], **args: Any) -> Callable[..., Any]:
    @wraps(inner)
    def timed(*arguments: Any, **options: Any) -> Any:
        with span(inner.__name__, micro_batch=options.get("current_microbatch"), **args):
            result = inner(*arguments, **options)
            torch.cuda.current_stream().synchronize()  # else this would be the host's time, not the GPU's
            return result

    return timed
