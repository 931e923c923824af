"""What a parallel layout and a model ask of the rows, against figures worked by hand.

Not proven: that the model needs these multiples; the layout invariance tests run them.
"""

from __future__ import annotations

import pytest

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.sizing.parallel_layouts import batch_layout

# DeepSeek-R1-Distill-Qwen-7B's config.json: 7,615,616,512 parameters, 544,997,376 of them the input embedding's.
QWEN_7B = {
    "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def test_multiples_of_the_layout() -> None:
    parallel = ParallelConfig(
        ranks=32, tensor=2, context=2, pipeline=4, virtual_pipeline=7, sequence=True, micro_batch_tokens=65536
    )
    found = batch_layout(parallel, QWEN_7B)
    assert (found.data_ranks, found.budget_tokens, found.rows_multiple) == (2, 65536, 4)
    assert (found.alignment, found.sequence_alignment) == (8, 4)
    plain = batch_layout(ParallelConfig(ranks=4, tensor=2, pipeline=2), QWEN_7B)
    assert (plain.data_ranks, plain.alignment, plain.sequence_alignment, plain.rows_multiple) == (1, 4, 1, 1)


def test_cost_of_the_model() -> None:
    """Attention overtakes the rest where 2 * 28 * 3584 * L = 2 * 7.07e9: at 70K tokens. A tied output layer is still
    multiplied with, so untying changes nothing; biases (below 0.1%) are left out."""
    cost = batch_layout(ParallelConfig(), QWEN_7B).cost
    assert cost.linear == pytest.approx(2 * (7_615_616_512 - 544_997_376), rel=1e-3)
    assert cost.quadratic == 2 * 28 * 3584
    assert cost.linear / cost.quadratic == pytest.approx(70_450, rel=1e-3)
    assert batch_layout(ParallelConfig(), {**QWEN_7B, "tie_word_embeddings": True}).cost == cost
