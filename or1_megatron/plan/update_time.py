"""Predicts the time of an update, from packed rows, arithmetic by pipeline stage, and communication.

``rl.packing`` packs the rows, as in a run. Sizes: T tokens of a packed row, L tokens of a sequence, H hidden size, CP
context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Final

import numpy as np

from or1_megatron.config.hardware import Rates
from or1_megatron.config.schema import Config, ParallelConfig
from or1_megatron.plan.rollout_time import all_reduce_s, link_bytes_per_s, message_s
from or1_megatron.rl.packing import RowPlan, plan_rows
from or1_megatron.sizing.memory import fullest_stage, layer_numbers
from or1_megatron.sizing.parallel_layouts import rows_of
from or1_megatron.types import Int64Array
from or1_megatron.weights.shape import BYTES, Shape

OPTIMIZER_TRAFFIC: Final = 30
"""Bytes that AdamW reads and writes per parameter: gradient 4, moments 16, master weight 8, bf16 weight 2."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """Number of floating-point operations in the forward pass of one pipeline stage."""

    layer_token: float
    """Operations per token of all layers of the stage."""
    mlp_token: float
    """The part of ``layer_token`` that the MLPs take."""
    pair: float
    """Attention's operations per pair of tokens; a sequence of L tokens has L * L pairs."""
    head_token: float
    """Operations per token of the output layer; 0 except on the last stage."""
    layers: int


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Predicted seconds of an update: all SGD steps of one rollout step."""

    compute_s: float
    """Arithmetic of the busiest data-parallel rank."""
    bubble_s: float
    """Waits of pipeline stages for the first and last micro-batches."""
    tensor_s: float
    """Communication within tensor- and context-parallel groups."""
    gradients_s: float
    """Reduction of gradients and gathering of weights, except the time that a backward pass hides."""
    optimizer_s: float
    rows: int
    """Number of micro-batches (packed rows) per rank, over all SGD steps."""

    @property
    def seconds(self) -> float:
        return self.compute_s + self.bubble_s + self.tensor_s + self.gradients_s + self.optimizer_s


def stage_work(parallel: ParallelConfig, shape: Shape) -> tuple[StageWork, ...]:
    """Return each pipeline stage's operations: 2 per weight and token, 2 * query channels per layer and token pair."""
    works = []
    for stage, layers in enumerate(parallel.stage_layers(shape.layers)):
        weights = sum(shape.layer_parameters(layer, whole=False) for layer in layers)
        last = stage == parallel.pipeline - 1
        works.append(
            StageWork(
                layer_token=2.0 * weights,
                mlp_token=2.0 * (weights - sum(map(shape.attention_parameters, layers))),
                pair=2.0 * shape.full_attention(layers) * shape.query_channels,
                head_token=2.0 * shape.vocab * shape.hidden if last else 0.0,
                layers=len(layers),
            )
        )
    return tuple(works)


def update_time(config: Config, shape: Shape, rates: Rates, mini_batches: list[Int64Array], reuse: int) -> UpdateTime:
    """Predict the time of training ``reuse`` times on ``mini_batches``, given by their sequences' lengths [n]."""
    rates = rates.with_busy(config.parallel.ranks)
    parts = [_sgd_step(config, shape, rates, lengths) for lengths in mini_batches if lengths.size] * reuse
    return UpdateTime(*map(sum, zip(*map(astuple, parts), strict=True))) if parts else UpdateTime(0, 0, 0, 0, 0, 0)


def _sgd_step(config: Config, shape: Shape, rates: Rates, lengths: Int64Array) -> UpdateTime:
    parallel = config.parallel
    plan = plan_rows(lengths, rows_of(parallel, shape))
    speed = rates.bf16_flops * rates.update_share * parallel.tensor * parallel.context
    rows = len(plan.ranks[0])
    moved = BYTES[config.model.dtype] * layer_numbers(parallel, shape, "none") / parallel.context
    layer_s = rates.activation_passes * rows * plan.row_tokens * moved / (rates.memory_bytes_per_s * rates.memory_share)
    slowest = max(
        _stage_seconds(plan, lengths, parallel, work, speed, bool(shape.adapters)) + work.layers * layer_s
        for work in stage_work(parallel, shape)
    )
    bubble = slowest * (parallel.pipeline - 1) / (rows * parallel.virtual_pipeline)
    tensor = rows * _row_communication_s(plan.row_tokens, config, shape, rates)
    last_backward_s = slowest / rows * 2 / 3 if parallel.overlap_grad_reduce else 0.0
    gradients_s, optimizer_s = _after_backward(config, shape, rates)
    return UpdateTime(
        compute_s=slowest,
        bubble_s=bubble,
        tensor_s=tensor,
        gradients_s=max(0.0, gradients_s - last_backward_s),
        optimizer_s=optimizer_s,
        rows=rows,
    )


def _stage_seconds(
    plan: RowPlan, lengths: Int64Array, parallel: ParallelConfig, work: StageWork, speed: float, frozen: bool
) -> float:
    """Return the seconds of a pipeline stage's forward and backward passes over the packed rows of the busiest rank."""
    per_token, per_pair = passes(work, parallel, frozen)
    costliest = 0.0
    for rows in plan.ranks:
        total = 0.0
        for row in rows:
            own = lengths[list(row)].astype(np.float64)
            total += per_token * plan.row_tokens
            total += per_pair * float(np.square(own).sum() + (plan.row_tokens - own.sum()) ** 2)
        costliest = max(costliest, total)
    return costliest / speed


def passes(work: StageWork, parallel: ParallelConfig, frozen: bool = False) -> tuple[float, float]:
    """Return the operations of a forward and backward pass, with recomputation: (per token, per pair of tokens).

    A layer takes 3 times its forward pass, or 4 with full recompute; with selective recompute, only its MLP takes 4.
    The head takes 4, or 3 in one_pass. ``frozen`` weights (LoRA) save 1 per token in both; adapters (1%) are left out.
    """
    again = {"none": 0.0, "selective": work.mlp_token, "full": work.layer_token}[parallel.recompute]
    head = 4 if parallel.head == "recompute" else 3
    pairs = 4 if parallel.recompute == "full" else 3
    return (3 - frozen) * work.layer_token + again + (head - frozen) * work.head_token, pairs * work.pair


def _row_communication_s(tokens: int, config: Config, shape: Shape, rates: Rates) -> float:
    """Return the seconds of a packed row's collectives. TP has two all-reduces of [T / CP, H] per layer and pass (with
    sequence parallelism, four collectives instead). CP gathers keys and values in each forward pass and reduces their
    gradients in the backward pass."""
    parallel = config.parallel
    number, layers = BYTES[config.model.dtype], shape.layers / parallel.pipeline
    forward = 2 if parallel.recompute == "full" else 1
    total = 0.0
    if parallel.tensor > 1:
        size = tokens / parallel.context * shape.hidden * number
        messages = 2 if parallel.sequence else 1  # a reduce-scatter and an all-gather for an all-reduce
        reduce_s = all_reduce_s(size, parallel.tensor, rates) + messages * message_s(parallel.tensor, rates)
        total += 2 * (forward + 1) * layers * reduce_s
    if parallel.context > 1:
        size = tokens * shape.key_value_channels * number / parallel.tensor
        crossing = parallel.tensor * parallel.context
        rate = link_bytes_per_s(crossing, rates) * rates.link_share
        total += (forward + 1) * layers * size * (parallel.context - 1) / parallel.context / rate
    return total


def _after_backward(config: Config, shape: Shape, rates: Rates) -> tuple[float, float]:
    """Return (seconds to reduce fp32 gradients and gather weights over DP and CP ranks, seconds of AdamW)."""
    parallel = config.parallel
    fullest = fullest_stage(parallel, shape)
    weights = sum(fullest.trained)
    sharing = parallel.data * parallel.context
    link = link_bytes_per_s(parallel.tensor * sharing, rates) * rates.link_share
    moved = weights * (4 + BYTES[config.model.dtype]) * (sharing - 1) / sharing
    bandwidth = rates.memory_bytes_per_s * rates.memory_share
    return moved / link, weights / parallel.optimizer_ranks * OPTIMIZER_TRAFFIC / bandwidth
