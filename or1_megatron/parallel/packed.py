"""Packed rows inside the model: token positions, rotary angles and attention, each within its own sequence.

A micro-batch is one row of T tokens in which S sequences lie end to end. Megatron passes one ``packed_seq_params``
object unchanged to every layer. We pass a ``PackedRow``, with the tokens' positions and the sequences' lengths.

Shapes: T row tokens, S sequences, N query heads, G key/value heads of this TP rank, D head dimension. Under context
parallelism (``context_parallel.py``) a rank holds T / CP of the row's tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from or1_megatron.parallel.context_parallel import ContextShard, attend, context_shard


@dataclass
class PackedRow(PackedSeqParams):
    """One packed row. With ``qkv_format`` "thd", Megatron would apply RoPE sequence by sequence. With our value
    "packed", Megatron keeps [T, 1, heads, D] and applies RoPE to all tokens at once, by ``PackedRotary``'s angles."""

    position_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[T / CP]: the position of each of this rank's tokens within the token's sequence."""
    lengths: tuple[int, ...] = ()
    """Lengths of the row's sequences, [S]."""
    shard: ContextShard | None = None
    """This rank's part of the row; None if this rank holds the whole row."""
    experts: Tensor | None = None
    """[t, L, k] the k experts of each token in each of L layers; None: the policy's router chooses them."""
    counted: Tensor | None = None
    """[t] bool: whether the token is counted in the loss; None if ``experts`` is None."""
    rerouted: dict[int, Tensor] = field(default_factory=dict)
    """For each layer that has computed the row: how many counted tokens the policy would have sent to other experts."""


def pack_row(cu_seqlens: Tensor, position_ids: Tensor, context_rank: int = 0, context: int = 1) -> PackedRow:
    """Return one rank's view of the row that ``cu_seqlens`` [S+1] int32 and ``position_ids`` [T] describe.

    Args:
        position_ids: on the model's device.
        context_rank: this rank's index among the ``context`` ranks that share the row.
    """
    bounds, where = cu_seqlens.tolist(), position_ids.device
    lengths = tuple(end - start for start, end in itertools.pairwise(bounds))
    there = cu_seqlens.to(where)
    row = PackedRow("packed", there, there, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), lengths=lengths)
    row.shard = context_shard(bounds, context_rank, context, where) if context > 1 else None
    row.position_ids = position_ids if row.shard is None else position_ids[row.shard.held]
    return row


class PackedRotary(torch.nn.Module):
    """Computes each packed token's rotary angles (RoFormer, arXiv 2104.09864), in HF models' half-rotation form.

    This class replaces Megatron's RotaryEmbedding and has the same two methods, which here use the row's positions.
    """

    def __init__(self, frequencies: Tensor, axes: int = 2) -> None:
        """
        Args:
            frequencies: [D/2] fp32 radians per token (``weights.rope``).
            axes: number of axes of size 1 between tokens and angles. Latent attention has no batch axis and needs 1.
        """
        super().__init__()
        self._axes = axes
        self.register_buffer("inverse_frequency", frequencies, persistent=False)
        self.inverse_frequency: Tensor

    def get_rotary_seq_len(
        self, inference: Any, decoder: Any, decoder_input: Any, config: Any, packed_seq_params: PackedRow
    ) -> Tensor:
        """Return the positions; Megatron passes them to ``forward`` as the sequence length."""
        return packed_seq_params.position_ids

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Map positions [T] to fp32 angles [T, 1, 1, D] (or, if ``axes`` is 1, [T, 1, D])."""
        angles = positions[:, None].float() * self.inverse_frequency[None, :].to(positions.device)
        return torch.cat((angles, angles), dim=-1).view(len(positions), *(1,) * self._axes, -1)


class PackedCausalAttention(torch.nn.Module):
    """Causal self-attention inside each sequence of a packed row; torch's fused SDPA does the work.

    Megatron builds it as a layer's ``core_attention``.
    """

    def __init__(
        self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        """``softmax_scale`` is the factor of q . k; None means 1 / sqrt(D)."""
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
        # Values are copied: as a view they would keep queries and keys from before RoPE for the backward pass.
        q, k, v = query[:, 0], key[:, 0], value[:, 0].contiguous()
        if packed_seq_params.shard is not None:
            out = attend(q, k, v, packed_seq_params.shard, self.chunk)
        else:
            sequences = zip(*(x.split(packed_seq_params.lengths) for x in (q, k, v)), strict=True)
            out = torch.cat([self.chunk(*parts) for parts in sequences])
        return out.reshape(query.shape[0], 1, -1)

    def chunk(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention [l, N, D] of the last l tokens' queries to all m tokens' keys and values [m, G, D]."""
        return attention(query, key, value, self.softmax_scale)


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Return attention [l, N, D] of queries [l, N, D] to keys and values [m, G, D]. Without ``mask`` it is causal."""
    if mask is None and len(query) != len(key):
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes a second

        mask = causal_lower_right(len(query), len(key))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, tokens, D]
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)
