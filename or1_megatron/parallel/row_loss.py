"""Computes one packed row's loss, or log-probs and entropies, from the last stage's hidden states by the fused head.

Shapes as in ``device_row``; H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from or1_megatron.interfaces import Objective, scope_of
from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies, one_pass_loss
from or1_megatron.parallel.device_row import DeviceRow, gather_counted
from or1_megatron.parallel.model import PolicyModel
from or1_megatron.rl.objectives.whole_batch import needs_scores


def _head_input(model: PolicyModel, hidden: Tensor, row: DeviceRow) -> tuple[Tensor, Tensor, VocabularyShard]:
    """Return (counted tokens' hidden states [c, H], output weight, vocabulary shard) from ``hidden`` [t, 1, H].

    Under sequence parallelism ``hidden`` has only t / TP tokens.
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


def objective_loss(
    objective: Objective, one_pass: bool, row: DeviceRow, model: PolicyModel, hidden: Tensor
) -> tuple[Tensor, Tensor, tuple[Mapping[str, Tensor], Tensor]]:
    """Return (loss, token count, (named sums, log-probs and entropies [2, c])) of one row.

    Megatron's schedules expect this form from the last stage.

    Raises:
        ValueError: the head cannot evaluate this objective; ``rl.objectives.whole_batch`` must do so before the update.
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


def score_row(temperature: float, row: DeviceRow, model: PolicyModel, hidden: Tensor, non_loss_data: bool) -> Tensor:
    """Return log-probs and entropies [2, C] of one row, on the CPU of every context-parallel rank."""
    counted, weight, shard = _head_input(model, hidden, row)
    return gather_counted(row, torch.stack(log_probs_and_entropies(counted, weight, row.targets, temperature, shard)))
