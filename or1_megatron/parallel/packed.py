"""Packed rows inside the model: the positions of each sequence, and attention inside it.

A micro-batch is one row of T tokens in which S sequences lie end to end. Megatron passes one ``packed_seq_params``
object unchanged to every layer; ours holds the position of each token and a padded view of the row, computed once per
micro-batch, with which attention runs as a few dense causal calls.

Shapes: T row tokens, S sequences, B sequences in one bucket, L its longest sequence, N query heads, G key/value heads
of this TP rank, D head dimension. Under context parallelism (``context.py``) a rank holds T / CP of the row's tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from or1_megatron.parallel.context import ContextShard, attend, context_shard


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of similar length, addressed as a padded [B, L] block of row positions."""

    gather: Tensor  # [B, L] int64; padding points at the sequence's last token
    rows: Tensor  # [sum of lengths] int64: the row position of every real token, in bucket order
    cells: Tensor  # [sum of lengths] int64: its cell in the flattened [B * L] block


@dataclass
class PackedRow(PackedSeqParams):
    """One packed row. ``qkv_format`` is not ``thd``: Megatron then keeps [T, 1, heads, D] and applies RoPE with the
    per-token angles of ``PackedRotary`` instead of looping over sequences."""

    position_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[T / CP]: positions, in their sequences, of the tokens that this rank holds."""
    shard: ContextShard | None = None
    """This rank's part of the row, with which the buckets are unused; None if it holds the whole row."""
    buckets: tuple[LengthBucket, ...] = ()
    unsort: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[T]: the place of each row position in the buckets' outputs, end to end."""


def _bucket_sequences(lengths: list[int], slack: float) -> list[list[int]]:
    """Sort sequence indices by descending length, and cut where padding would exceed ``slack`` of a bucket's cells."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    used = 0
    for i in order:
        if buckets:
            longest = lengths[buckets[-1][0]]
            cells = longest * (len(buckets[-1]) + 1)
            if cells - used - lengths[i] <= slack * cells:
                buckets[-1].append(i)
                used += lengths[i]
                continue
        buckets.append([i])
        used = lengths[i]
    return buckets


def pack_row(
    cu_seqlens: Tensor, position_ids: Tensor, context_rank: int = 0, context: int = 1, slack: float = 0.2
) -> PackedRow:
    """Return one rank's view of the row that ``cu_seqlens`` [S+1] int32 and ``position_ids`` [T] describe.

    Args:
        position_ids: on the model's device.
        context_rank: this rank's index among the ``context`` ranks that share the row.
        slack: largest share of padding among a bucket's cells.
    """
    bounds = cu_seqlens.tolist()
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    where = position_ids.device
    bounds_there = cu_seqlens.to(where)
    row = PackedRow("packed", bounds_there, bounds_there, max_seqlen_q=longest, max_seqlen_kv=longest)
    if context > 1:
        row.shard = context_shard(bounds, context_rank, context, where)
        row.position_ids = position_ids[row.shard.held]
    else:
        row.position_ids = position_ids
        row.buckets = _buckets(bounds, slack, where)
        order = torch.cat([bucket.rows for bucket in row.buckets])  # a permutation of 0..T-1
        row.unsort = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=where))
    return row


def _buckets(bounds: list[int], slack: float, where: torch.device) -> tuple[LengthBucket, ...]:
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    buckets = []
    for members in _bucket_sequences(lengths, slack):
        longest = lengths[members[0]]
        starts = torch.tensor([bounds[i] for i in members])[:, None]
        sizes = torch.tensor([lengths[i] for i in members])[:, None]
        columns = torch.arange(longest)[None, :]
        gather = starts + torch.minimum(columns, sizes - 1)
        real = (columns < sizes).flatten()
        cells = real.nonzero(as_tuple=True)[0]
        rows = gather.flatten()[cells]
        buckets.append(LengthBucket(gather.to(where), rows.to(where), cells.to(where)))
    return tuple(buckets)


class PackedRotary(torch.nn.Module):
    """Rotary angles of each packed token (RoFormer, arXiv 2104.09864), in the half-rotation form that HF models use.

    Replaces Megatron's RotaryEmbedding, and answers its two methods with the row's own positions.
    """

    def __init__(self, frequencies: Tensor) -> None:
        """``frequencies``: [D/2] fp32 radians per token (``weights.rope``)."""
        super().__init__()
        self.register_buffer("inverse_frequency", frequencies, persistent=False)
        self.inverse_frequency: Tensor

    def get_rotary_seq_len(
        self, inference: Any, decoder: Any, decoder_input: Any, config: Any, packed_seq_params: PackedRow
    ) -> Tensor:
        """Return the positions, which Megatron passes on to ``forward`` as the sequence length."""
        return packed_seq_params.position_ids

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Map [T] positions to [T, 1, 1, D] angles, fp32."""
        angles = positions[:, None].float() * self.inverse_frequency[None, :].to(positions.device)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class PackedCausalAttention(torch.nn.Module):
    """Causal self-attention inside each sequence of a packed row; torch's fused SDPA does the work.

    Megatron builds it as a layer's ``core_attention``. Padding cells repeat a sequence's last token *after* it, where
    the causal mask hides them from every real token.
    """

    def __init__(
        self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        """``softmax_scale``: factor of q . k; 1 / sqrt(D) when None."""
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [T / CP, 1, N, D]
        key: Tensor,  # [T / CP, 1, G, D]
        value: Tensor,  # [T / CP, 1, G, D]
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:  # [T / CP, 1, N * D]
        assert packed_seq_params is not None, "PackedCausalAttention needs packed_seq_params"
        tokens, _, heads, head_dim = query.shape
        if packed_seq_params.shard is not None:
            out = attend(query[:, 0], key[:, 0], value[:, 0], packed_seq_params.shard, self.softmax_scale)
            return out.reshape(tokens, 1, heads * head_dim)
        grouped = key.shape[2] != heads
        outputs = []
        for bucket in packed_seq_params.buckets:
            q, k, v = (x[:, 0].index_select(0, bucket.gather.flatten()) for x in (query, key, value))
            q, k, v = (x.unflatten(0, bucket.gather.shape).transpose(1, 2) for x in (q, k, v))  # [B, heads, L, D]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
            outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.cells))
        return torch.cat(outputs).index_select(0, packed_seq_params.unsort).reshape(tokens, 1, heads * head_dim)
