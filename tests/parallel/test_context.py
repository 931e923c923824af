"""How context parallelism cuts packed rows (test_parity.py: attention over the parts is right); sinks in blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from or1_megatron.parallel import sink_attention
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


@pytest.mark.parametrize("window", [99, 3])
def test_sinks_in_blocks(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 9 of 11 tokens, in blocks of 4, against a softmax over all keys and the sink."""
    monkeypatch.setattr(sink_attention, "_BLOCK", 4)
    config = SimpleNamespace(num_attention_heads=4, params_dtype=torch.float64, window_size=(window - 1, 0))
    config.window_attn_skip_freq, groups = None, SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    core: Any = sink_attention.SinkAttention(config, 1, pg_collection=groups, softmax_scale=0.3)  # type: ignore[arg-type]
    core.softmax_offset.data.normal_()
    q, k, v = (torch.randn(tokens, heads, 8).double() for tokens, heads in ((9, 4), (11, 2), (11, 2)))
    k2, v2 = (x.repeat_interleave(2, dim=1) for x in (k, v))
    ahead = torch.arange(11) - torch.arange(2, 11)[:, None]
    logits = 0.3 * torch.einsum("lnd,mnd->nlm", q, k2).masked_fill((ahead > 0) | (ahead <= -window), -torch.inf)
    shares = torch.cat((logits, core.softmax_offset[:, None, None].expand(4, 9, 1)), dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(core.chunk(q, k, v), torch.einsum("nlm,mnd->lnd", shares, v2))
