"""Predicts the times of a vLLM engine's iteration and of a weight handoff, from model shape, layout and device rates.

Sizes: k ranks of an engine, H hidden size, n responses that decode together.
"""

from __future__ import annotations

from typing import Final

from or1_megatron.config.hardware import Rates
from or1_megatron.config.schema import Config
from or1_megatron.plan.engines import EngineClock
from or1_megatron.rl.packing import SequenceCost
from or1_megatron.sizing.conflicts import engine_state_bytes, kv_tokens
from or1_megatron.sizing.kv_cache import ENGINE_RESERVE_BYTES
from or1_megatron.weights.shape import BYTES, Shape

_HALF_BLOCK: Final = 8
"""Tokens that a response wastes in the KV cache: its last block of 16 tokens is half empty on average."""


def all_reduce_s(size_bytes: float, ranks: int, rates: Rates) -> float:
    """Return the seconds of a large ring all-reduce over k ranks: each link carries 2 (k - 1) / k of the bytes."""
    return 2 * (ranks - 1) / ranks * size_bytes / (link_bytes_per_s(ranks, rates) * rates.link_share)


def message_s(ranks: int, rates: Rates) -> float:
    """Return the seconds of a small all-reduce over ``ranks`` ranks."""
    return rates.message_s if ranks <= rates.node_devices else rates.network_message_s


def link_bytes_per_s(ranks: int, rates: Rates) -> float:
    """Return the rate between two ranks: the rate within a node if ``ranks`` ranks fit into one, else between nodes."""
    return rates.link_bytes_per_s if ranks <= rates.node_devices else rates.network_bytes_per_s


def engine_clock(config: Config, shape: Shape, rates: Rates) -> EngineClock:
    """Return the predicted times and limits of one engine of ``config``.

    Each iteration reads all weights, including all experts. The input embedding counts only if it is also the output
    layer. Tensor parallelism adds two all-reduces of [n, H] per layer.
    """
    rollout, k = config.rollout, config.rollout.tensor_parallel
    rates = rates.with_busy(rollout.engines * k)
    number = BYTES[config.model.dtype]
    read = shape.parameters - (0 if shape.tied else shape.vocab * shape.hidden)
    bandwidth = rates.memory_bytes_per_s * rates.memory_share * k
    products = rates.bf16_flops * rates.product_share * k
    cost = SequenceCost.of_decoder(shape.multiplied_weights, shape.attention_width)
    reduces = 2 * shape.layers if k > 1 else 0
    reduce_token_s = reduces * all_reduce_s(shape.hidden * number, k, rates)
    kv_bytes = shape.kv_bytes_per_token(config.model.dtype)
    return EngineClock(
        fixed_s=rates.iteration_s + reduces * message_s(k, rates),
        response_s=rates.request_s + reduce_token_s + 2 * shape.state_bytes(config.model.dtype) / bandwidth,
        weights_s=read * number / bandwidth,
        product_s=cost.linear / products,
        token_s=kv_bytes / (bandwidth / k * min(k, shape.kv_heads)),
        prompt_token_s=cost.linear / products + reduce_token_s,
        prompt_pair_s=cost.quadratic / products,
        kv_tokens=max(0, cache_tokens(config, shape, rates) - _HALF_BLOCK * rollout.max_concurrent),
        max_running=rollout.max_concurrent,
    )


def cache_tokens(config: Config, shape: Shape, rates: Rates) -> int:
    """Return how many tokens an engine's KV cache holds. If vLLM sizes the cache, ``gpu_memory_fraction`` decides."""
    held = kv_tokens(config, shape)
    if held is not None:
        return held
    rollout = config.rollout
    weights = shape.parameters * BYTES[config.model.dtype] / rollout.tensor_parallel
    left = rates.memory_bytes * rollout.gpu_memory_fraction - weights - ENGINE_RESERVE_BYTES
    cut = min(rollout.tensor_parallel, shape.kv_heads)
    left -= engine_state_bytes(config, shape)
    return max(0, int(left * cut / shape.kv_bytes_per_token(config.model.dtype)))


def hand_off_s(config: Config, shape: Shape, rates: Rates) -> float:
    """Return the seconds of a handoff: the busiest rank's time on its link plus the time of packing and loading.

    Each engine rank receives its shard. Trainer ranks send equal parts of all these shards. Bytes stay in a node if
    engines are colocated and a node holds the whole model. Packing and loading each read and write a shard.
    """
    parallel, rollout = config.parallel, config.rollout
    shard = shape.parameters * BYTES[config.model.dtype] / rollout.tensor_parallel
    sent = shard * rollout.engines * rollout.tensor_parallel / parallel.ranks
    within = rollout.placement == "colocated" and parallel.tensor * parallel.pipeline <= rates.node_devices
    rate = rates.link_bytes_per_s if within else rates.network_bytes_per_s
    return max(shard, sent) / (rate * rates.link_share) + 4 * shard / (rates.memory_bytes_per_s * rates.memory_share)
