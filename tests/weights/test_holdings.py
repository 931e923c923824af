"""Which rank holds which part of which HF tensor: by hand, and against ``cut(fuse(...))`` itself on real tensors.

Does not prove that the rows of the table are right (tests of the policy do), nor anything about expert parallelism.
"""

from __future__ import annotations

import math

import pytest
import torch

from or1_megatron.weights.dense import QWEN2
from or1_megatron.weights.holdings import Holding, RankGrid, holdings, intersection, pieces, without
from or1_megatron.weights.slicing import cut

HF = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 13,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."


def row_of(name: str):
    return next(row for row in QWEN2.rows(HF) if name in row.hf)


def held(name: str, rank: int, size: int) -> list[tuple]:
    found = pieces(row_of(name), HF, QWEN2.shapes(HF), rank, size)
    return [(piece.box, piece.place) for piece in found if piece.name == name]


def test_fused_qkv_with_grouped_queries_by_hand() -> None:
    """4 query heads and 2 groups of D = 4: rank 0 of 2 holds [q0 q1 k0 v0], rank 1 [q2 q3 k1 v1]."""
    q, k, v = (f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv")
    every = (0, 16)
    assert held(q, 0, 2) == [(((0, 8), every), ((0, 8), every))]
    assert held(k, 0, 2) == [(((0, 4), every), ((8, 12), every))]
    assert held(v, 1, 2) == [(((4, 8), every), ((12, 16), every))]
    assert held(q, 1, 2) == [(((8, 16), every), ((0, 8), every))]
    # uncut, the two groups lie apart: [q0 q1 k0 v0 q2 q3 k1 v1]
    assert held(q, 0, 1) == [(((0, 8), every), ((0, 8), every)), (((8, 16), every), ((16, 24), every))]
    assert held(f"{LAYER}self_attn.k_proj.bias", 1, 2) == [(((4, 8),), ((8, 12),))]


def test_gate_up_rows_and_columns_by_hand() -> None:
    assert held(f"{LAYER}mlp.up_proj.weight", 1, 2) == [(((12, 24), (0, 16)), ((12, 24), (0, 16)))]
    assert held(f"{LAYER}mlp.gate_proj.weight", 1, 2) == [(((12, 24), (0, 16)), ((0, 12), (0, 16)))]
    assert held(f"{LAYER}mlp.down_proj.weight", 1, 2) == [(((0, 16), (12, 24)), ((0, 16), (0, 12)))]
    assert held(f"{LAYER}input_layernorm.weight", 1, 2) == [(((0, 16),), ((0, 16),))]


def test_padding_of_the_vocabulary_belongs_to_nobody() -> None:
    """13 rows in two parts of 7: the last row of the second is padding."""
    assert held("model.embed_tokens.weight", 0, 2) == [(((0, 7), (0, 16)), ((0, 7), (0, 16)))]
    assert held("model.embed_tokens.weight", 1, 2) == [(((7, 13), (0, 16)), ((0, 6), (0, 16)))]


@pytest.mark.parametrize("size", [1, 2])
def test_pieces_say_where_cut_and_fuse_put_things(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in QWEN2.shapes(HF).items()}
    for row in QWEN2.rows(HF):
        covered = 0
        for rank in range(size):
            shard = cut(row.layout.fuse([tensors[name] for name in row.hf], HF), row.cut, rank, size)
            for piece in pieces(row, HF, QWEN2.shapes(HF), rank, size):
                there = shard[tuple(slice(*bounds) for bounds in piece.place)]
                assert torch.equal(there, tensors[piece.name][tuple(slice(*bounds) for bounds in piece.box)])
                covered += there.numel()
        copies = size if row.cut.value == "whole" else 1
        assert covered == copies * sum(math.prod(QWEN2.shapes(HF)[name]) for name in row.hf)


def test_ranks_of_a_grid_by_hand() -> None:
    """TP2, two replicas, PP2: rank = tensor + 2 * replica + 4 * stage; a norm is on every rank of its stage."""
    stage = {"decoder.layers.0.": 0, "decoder.layers.1.": 1}

    def stage_of(row) -> int:
        return next((at for prefix, at in stage.items() if row.megatron.startswith(prefix)), 0)

    found = holdings(QWEN2.rows(HF), HF, QWEN2.shapes(HF), stage_of, RankGrid(2, 2, 2))
    named = [holding for holding in found if holding.name == "model.layers.1.mlp.down_proj.weight"]
    assert named == [
        Holding("model.layers.1.mlp.down_proj.weight", ((0, 16), (0, 12)), (4, 6)),
        Holding("model.layers.1.mlp.down_proj.weight", ((0, 16), (12, 24)), (5, 7)),
    ]
    norm = next(holding for holding in found if holding.name == f"{LAYER}input_layernorm.weight")
    assert norm == Holding(f"{LAYER}input_layernorm.weight", ((0, 16),), (0, 1, 2, 3))


def test_ranks_of_experts_by_hand() -> None:
    """TP2, four replicas in two expert ranks: ranks 0..7, replica = rank // 2, expert rank = replica % 2."""
    grid = RankGrid(2, 4, 1, expert=2)
    assert list(grid.ranks(0, 1)) == [1, 3, 5, 7]
    assert list(grid.ranks(0, 1, expert_rank=0)) == [1, 5]
    assert list(grid.ranks(0, 0, expert_rank=1)) == [2, 6]


def test_rectangles() -> None:
    assert intersection(((0, 4), (2, 6)), ((2, 8), (0, 4))) == ((2, 4), (2, 4))
    assert intersection(((0, 4),), ((4, 8),)) is None
    assert without(((0, 4), (0, 4)), ((1, 2), (0, 3))) == [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (3, 4))]
