"""Operations, communication and clocks against figures worked by hand.

Not proven here: the rates of any device, and that a run reaches them (lab/benchmarks/plan_paper.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from or1_megatron.config.hardware import Rates
from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config
from or1_megatron.plan.clocks import engine_clock, hand_off_s
from or1_megatron.plan.update_time import passes, stage_work, update_time
from or1_megatron.sizing.memory import offloaded_bytes
from or1_megatron.weights.shape import Shape

ROOT = Path(__file__).resolve().parents[2]
# A layer: 64 * 16 * (2*4 + 2*2) in attention, 3 * 64 * 96 in the MLP, 2 * 64 in norms. A vocabulary: 61 * 64.
ATTENTION, MLP, NORMS, VOCABULARY = 12_288, 18_432, 128, 3_904
SHAPE = Shape(4, 64, 96, 4, 2, 16, 61, 4096, False)
ROUND = Rates(
    bf16_flops=1e6, memory_bytes=1e9, memory_bytes_per_s=1e5, link_bytes_per_s=1e4, host_bytes_per_s=1e3,
    network_bytes_per_s=1e3, node_devices=8, product_share=1.0, memory_share=1.0,
    link_share=1.0, message_s=0.5, network_message_s=2.0, verdict_s=0.1,
    busy_share=1.0, activation_passes=0.0, error=0.1,
    iteration_s=2.0, request_s=0.25, update_share=0.5, other_response_s=0.0,
)  # fmt: skip


def config(*overrides: str) -> Config:
    plain = ["parallel.ranks=1", "parallel.pipeline=1", "parallel.micro_batch_tokens=256"]
    return load_config(ROOT / "examples" / "quickstart" / "quickstart.yaml", [*plain, *overrides])


def test_operations_of_the_stages() -> None:
    """Two stages of two layers; the head is the last one's."""
    first, last = stage_work(config("parallel.ranks=2", "parallel.pipeline=2").parallel, SHAPE)
    assert first.layer_token == last.layer_token == 2 * 2 * (ATTENTION + MLP + NORMS)
    assert first.mlp_token == 2 * 2 * (MLP + NORMS)
    assert first.pair == 2 * 2 * 4 * 16
    assert (first.head_token, last.head_token) == (0, 2 * VOCABULARY)


@pytest.mark.parametrize(
    ("recompute", "head", "layers", "heads", "pairs"),
    [("none", "recompute", 3, 4, 3), ("full", "one_pass", 4, 3, 4)],
)
def test_passes(recompute: str, head: str, layers: int, heads: int, pairs: int) -> None:
    parallel = config(f"parallel.recompute={recompute}", f"parallel.head={head}").parallel
    (work,) = stage_work(parallel, SHAPE)
    assert passes(work, parallel) == (layers * work.layer_token + heads * work.head_token, pairs * work.pair)


def test_an_update_of_one_rank() -> None:
    """Rows of 200 + 56 tokens and of 100: two sequences fit one row of 256, the third goes to another."""
    lengths = np.array([200, 56, 100])
    found = update_time(config(), SHAPE, ROUND, [lengths], reuse=2)
    (work,) = stage_work(config().parallel, SHAPE)
    token, pair = passes(work, config().parallel)
    # Two rows of T tokens; T is the shortest that holds 200 and 156.
    rows = 2 * 200 * token + pair * (200**2 + 56**2 + 100**2 + 44**2)
    assert found.rows == 4 and found.compute_s == pytest.approx(2 * rows / 0.5e6)
    assert (found.bubble_s, found.tensor_s, found.gradients_s) == (0, 0, 0)
    assert found.optimizer_s == pytest.approx(2 * 30 * SHAPE.parameters / 1e5)


def test_the_bubble_of_a_pipeline() -> None:
    """Two stages, three equal rows: one row's time of the slower stage, which has the head, is spent waiting."""
    found = update_time(
        config("parallel.ranks=2", "parallel.pipeline=2"), SHAPE, ROUND, [np.array([256, 256, 256])], reuse=1
    )
    assert found.bubble_s == pytest.approx(found.compute_s / 3)


def test_tensor_parallel_communication() -> None:
    """Four layers, four all-reduces each of [256, 64] in fp32 per row, in a ring of two: as many bytes per link; each
    is two messages."""
    changed = config("parallel.ranks=2", "parallel.tensor=2", "parallel.sequence=true")
    found = update_time(changed, SHAPE, ROUND, [np.array([256])], reuse=1)
    assert found.tensor_s == pytest.approx(4 * 4 * (256 * 64 * 4 / 1e4 + 2 * 0.5))


def test_what_layers_keep_is_moved_through_memory() -> None:
    """A row of 256 tokens: four layers keep 4 * 64 numbers, 16 * (2*4 + 2*2) of attention and 3 * 96 of the MLP, of
    4 bytes; moved three times. On two ranks of one layer pair each, half of it."""
    moving = replace(ROUND, activation_passes=3.0)
    row_s = 3 * 256 * (256 + 192 + 288) * 4 / 1e5
    pipeline = config("parallel.ranks=2", "parallel.pipeline=2")
    for changed, layers in ((config(), 4), (pipeline, 2)):
        before, after = (update_time(changed, SHAPE, rates, [np.array([256])], 1) for rates in (ROUND, moving))
        assert after.compute_s - before.compute_s == pytest.approx(layers * row_s)


def test_devices_that_all_compute_slow_each_other() -> None:
    """Two devices of a node that keep 0.8 of their speed while both compute: one rank or engine is not slowed."""
    shared = replace(ROUND, node_devices=2, busy_share=0.8)
    one = config("rollout.engines=1")
    two = config("rollout.engines=2", "parallel.ranks=2", "parallel.pipeline=2")
    for changed, share in ((one, 1.0), (two, 0.8)):
        slow, fast = (update_time(changed, SHAPE, rates, [np.array([256])], 1) for rates in (shared, ROUND))
        assert fast.seconds / slow.seconds == pytest.approx(share)
        slow_clock, fast_clock = (engine_clock(changed, SHAPE, rates) for rates in (shared, ROUND))
        assert fast_clock.parts_s(8, 0, 1).sum() / slow_clock.parts_s(8, 0, 1).sum() == pytest.approx(share)
        assert fast_clock.token_s / slow_clock.token_s == pytest.approx(share)


def test_the_clock_of_an_engine() -> None:
    """fp32, one rank: weights without the input embedding, keys and values of 4 layers * 2 heads * 16, twice."""
    clock = engine_clock(config("rollout.kv_cache_bytes=1048576", "rollout.max_concurrent=4"), SHAPE, ROUND)
    multiplied = 4 * (ATTENTION + MLP + NORMS) + VOCABULARY + 64
    assert (clock.fixed_s, clock.response_s) == (2.0, 0.25)
    assert clock.weights_s == pytest.approx(4 * multiplied / 1e5)
    assert clock.product_s == clock.prompt_token_s == pytest.approx(2 * multiplied / 1e6)
    assert clock.token_s == pytest.approx(4 * 2 * 4 * 2 * 16 / 1e5)
    assert clock.prompt_pair_s == pytest.approx(2 * 4 * 4 * 16 / 1e6)
    assert clock.kv_tokens == 1048576 // 1024 - 4 * 8
    two = engine_clock(
        config("rollout.kv_cache_bytes=1048576", "rollout.tensor_parallel=2", "rollout.max_concurrent=4"), SHAPE, ROUND
    )
    assert two.fixed_s == 2.0 + 2 * 4 * 0.5 and two.weights_s == clock.weights_s / 2
    assert two.response_s == pytest.approx(0.25 + 2 * 4 * 64 * 4 / 1e4)
    across = config("rollout.kv_cache_bytes=1048576", "rollout.tensor_parallel=2")
    assert engine_clock(across, SHAPE, replace(ROUND, node_devices=1)).fixed_s == 2.0 + 2 * 4 * 2.0


def test_a_handoff() -> None:
    """One engine takes all weights from one rank of its node, and reads and writes them twice."""
    size, one = 4 * SHAPE.parameters, config("rollout.engines=1")
    assert hand_off_s(one, SHAPE, ROUND) == pytest.approx(size / 1e4 + 4 * size / 1e5)
    assert offloaded_bytes(one, SHAPE) == 12 * SHAPE.parameters
