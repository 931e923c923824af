"""How context parallelism cuts packed rows. test_parity.py shows that attention over the parts is right."""

from __future__ import annotations

import pytest
import torch

from or1_megatron.parallel.context_parallel import context_shard, held_positions


def test_zig_zag_by_hand() -> None:
    """Sequences of 8 and 4 tokens over 2 ranks: chunks of 2 and of 1; rank 0 has the first and the last of each."""
    assert held_positions([0, 8, 12], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert held_positions([0, 8, 12], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    shard = context_shard([0, 8, 12], 1, 2, torch.device("cpu"))
    everyone = torch.cat([held_positions([0, 8, 12], rank, 2) for rank in range(2)])
    assert everyone[shard.to_row_order].tolist() == list(range(12))
    keys = [(chunk.query.start, chunk.query.stop, chunk.key.start, chunk.key.stop) for chunk in shard.chunks]
    assert keys == [(0, 2, 0, 4), (2, 4, 0, 6), (4, 5, 8, 10), (5, 6, 8, 11)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_same_causal_work(ranks: int) -> None:
    """Pairs of a query and a key that it sees, of one sequence of 64 tokens: 64 * 65 / 2 over the ranks."""
    work = [int((held_positions([0, 64], rank, ranks) + 1).sum()) for rank in range(ranks)]
    assert work == [64 * 65 // 2 // ranks] * ranks


def test_a_sequence_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(ValueError, match="a sequence of 6 tokens is not a multiple of 2"):
        held_positions([0, 6], 0, 2)
