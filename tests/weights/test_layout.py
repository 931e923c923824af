"""Layout and cut against tensors worked by hand and their own inverses. Not proven here: that Megatron uses this layout
(tests/parallel compares log-probs with transformers)."""

from __future__ import annotations

import pytest
import torch

from or1_megatron.weights.families import FAMILIES, ModelError, family_of
from or1_megatron.weights.layout import FusedQKV, GateUp, PaddedVocabulary
from or1_megatron.weights.slicing import Cut, cut, join

HF = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5, "num_hidden_layers": 2, "hidden_size": 8}


def test_fused_qkv_by_hand() -> None:
    """4 query heads in 2 groups, head dimension 1: rows come out as q0 q1 k0 v0 | q2 q3 k1 v1."""
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    fused = FusedQKV().fuse([q, k, v], HF)
    assert fused.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [part.tolist() for part in FusedQKV().split(fused, HF)] == [[0, 1, 2, 3], [10, 11], [20, 21]]
    assert cut(fused, Cut.COLUMN, 1, 2).tolist() == [2, 3, 11, 21]  # a rank holds whole groups


def test_gate_up_halves_by_hand() -> None:
    gate, up = torch.tensor([[0.0], [1.0]]), torch.tensor([[10.0], [11.0]])
    fused = GateUp().fuse([gate, up], HF)
    shards = [cut(fused, Cut.HALVES, rank, 2) for rank in range(2)]
    assert shards[0].flatten().tolist() == [0, 10]
    assert shards[1].flatten().tolist() == [1, 11]
    assert torch.equal(join(shards, Cut.HALVES), fused)


def test_vocabulary_is_padded_and_unpadded() -> None:
    embedding = torch.arange(10.0).reshape(5, 2)
    shards = [cut(embedding, Cut.VOCABULARY, rank, 2) for rank in range(2)]
    assert [shard.shape[0] for shard in shards] == [3, 3]
    assert shards[1][-1].tolist() == [0.0, 0.0]
    (back,) = PaddedVocabulary().split(join(shards, Cut.VOCABULARY), HF)
    assert torch.equal(back, embedding)


def test_indivisible_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="axis 0 into 3 parts"):
        cut(torch.zeros(4, 2), Cut.COLUMN, 0, 3)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ModelError, match=f"GPT2LMHeadModel is not supported; known: {', '.join(sorted(FAMILIES))}"):
        family_of({"architectures": ["GPT2LMHeadModel"]})
