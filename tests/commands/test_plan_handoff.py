"""``or1 plan-handoff`` on layouts worked by hand. That engines ask for just this is test_shard's to show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.config.schema import ParallelConfig
from or1_megatron.handoff.shard.forecast import expected_wants, forecast
from or1_megatron.weights.families import family_of

ROOT = Path(__file__).parents[2]
HF = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
# By hand, per layer: q and o 64*64, k and v 32*64, gate, up and down 96*64, biases 64 + 2*32, two norms of 64.
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 128 + 128
MODEL = 2 * LAYER + 2 * 100 * 64 + 64


def made(engines: int, of_ranks: int, transport: str = "gloo", **parallel: int):
    return forecast(HF, "bfloat16", ParallelConfig(**parallel), engines, of_ranks, 1 << 20, transport)


def test_wants_of_tensor_parallel_engines_by_hand() -> None:
    """The vocabulary of 100 is padded to 128 before it is cut; two key/value heads on four ranks: each on two."""
    family = family_of(HF)
    third = {want.name: want.box for want in expected_wants(family, HF, torch.bfloat16, 2, 4)}
    assert third["model.embed_tokens.weight"] == ((64, 96), (0, 64))
    assert third["model.layers.0.self_attn.q_proj.weight"] == ((32, 48), (0, 64))
    assert third["model.layers.0.self_attn.k_proj.weight"] == ((16, 32), (0, 64))
    assert third["model.layers.0.self_attn.o_proj.weight"] == ((0, 64), (32, 48))
    assert third["model.layers.0.mlp.down_proj.weight"] == ((0, 64), (48, 72))
    fourth = {want.name: want.box for want in expected_wants(family, HF, torch.bfloat16, 3, 4)}
    assert fourth["model.embed_tokens.weight"] == ((96, 100), (0, 64))


def test_two_whole_engines() -> None:
    """Each receives the model once, in bf16; two TP ranks send half of it each to both."""
    plan = made(2, 1, ranks=2, tensor=2)
    assert plan.received == {0: 2 * MODEL, 1: 2 * MODEL}
    assert sum(plan.sent.values()) == 4 * MODEL
    assert plan.sent[0] == pytest.approx(2 * MODEL, rel=0.02)
    assert plan.seconds(8.0) == max(plan.sent.values()) / 1e9  # 8 Gb/s are 1e9 bytes/s


def test_like_cut_engines_need_one_link_each() -> None:
    """TP2 to TP2: only the vocabulary, 50 + 50 here and 64 + 36 there, and the norms cross over."""
    plan = made(1, 2, ranks=2, tensor=2)
    assert plan.wanted == list(plan.received.values())
    crossing = plan.links.get((0, 3), 0) + plan.links.get((1, 2), 0)
    assert crossing <= 2 * (2 * 14 * 64 + 2 * 5 * 64)


def test_command_prints_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart: PP2 to two engines, 3.1 MiB each."""
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["plan-handoff", "examples/quickstart/quickstart.yaml", "--gigabits", "8"])
    assert result.exit_code == 0, result.output
    assert "each engine rank receives 3.1 to 3.1 MiB, 1.00 times its shard" in result.output
    assert (
        "links over shared_memory" in result.output
        and "6.2 MiB (float32)" in result.output
        and "0.00326 s at 8 Gb/s" in result.output
    )


def test_replicas_and_stages_all_send() -> None:
    plan = made(4, 1, ranks=8, tensor=2, pipeline=2)
    assert len(plan.sent) == 8
    by_stage = [sum(plan.sent[rank] for rank in range(first, first + 4)) for first in (0, 4)]
    assert by_stage == [8 * (LAYER + 6400), 8 * (LAYER + 6400 + 64)]
    for first in (0, 4):
        share = [plan.sent[rank] for rank in range(first, first + 4)]
        assert max(share) <= 1.3 * min(share)  # whole tensors, this small


def test_many_engines_pass_on() -> None:
    """One trainer rank, 8 engines: through its link the model goes once, not eight times."""
    plan = made(8, 1, ranks=1)
    assert plan.sent == dict.fromkeys(range(8), 2 * MODEL) and plan.busiest == 2 * MODEL
    assert plan.received == dict.fromkeys(range(8), 2 * MODEL)
    direct = made(8, 1, transport="shared_memory", ranks=1)
    assert direct.sent == {0: 16 * MODEL}


def test_two_hops_keep_on_the_device_what_is_there() -> None:
    """TP2 and DP2 to two engines of TP2 beside them: over the network only what is cut otherwise (the vocabulary)."""
    plan = made(2, 2, transport="gloo+shared_memory", ranks=4, tensor=2)
    assert plan.received == dict(enumerate(plan.wanted))
    assert plan.busiest <= 2 * 2 * 14 * 64
    assert all(stop - 4 == start for start, stop in plan.links if not plan.crosses((start, stop)))
