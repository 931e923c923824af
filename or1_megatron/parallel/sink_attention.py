"""Attention with sinks (gpt-oss): each head's softmax has one additional logit, trained, without a value vector.

In alternate layers a token sees a sliding window of the last tokens. Transformer Engine has no attention with sinks for
packed rows (``get_attention_backend`` finds none for ``thd``), so Transformer Engine's layers use this module too.

Shapes as in ``packed``; a sequence has m tokens, and the l queries belong to the last l of these tokens.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from or1_megatron.parallel.packed import PackedCausalAttention, attention

_BLOCK: Final = 1024  # queries computed at once, so that masks stay small
_WIDENED: Final = 8  # channels that heads get for the sink, which needs one; kernels want multiples of 8


class SinkAttention(PackedCausalAttention):
    """A layer's core attention with sinks, and with a window in the layers that ``config`` names."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, pg_collection: Any, **named: Any) -> None:
        super().__init__(config, layer_number, softmax_scale=named["softmax_scale"])
        self.config, self.tp_group = config, pg_collection.tp
        heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))  # Megatron's name
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if windowed and config.window_size else None  # with the token itself

    sharded_state_dict = DotProductAttention.sharded_state_dict

    def chunk(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention [l, N, D]. The sinks are the logits of an additional first key, whose value is zero."""
        before, window = len(key) - len(query), self._window or len(key)
        scale = self.softmax_scale or query.shape[-1] ** -0.5
        sinks = self.softmax_offset[None, :, None].expand(len(query), -1, 1)
        query = F.pad(torch.cat((query, sinks), dim=-1), (0, _WIDENED - 1))
        key, value = (F.pad(x, (0, _WIDENED, 0, 0, 1, 0)) for x in (key, value))
        key[0, :, -_WIDENED] = 1 / scale
        outputs = []
        for first in range(before, len(key) - 1, _BLOCK):
            queries = query[first - before :][:_BLOCK]
            begin, end = max(0, first + 1 - window), first + len(queries)
            rows, columns = (torch.arange(*ends, device=key.device) for ends in ((first, end), (begin, end)))
            seen = (columns <= rows[:, None]) & (columns > rows[:, None] - window)
            k, v = (torch.cat((x[:1], x[1 + begin : 1 + end])) if begin else x[: 1 + end] for x in (key, value))
            outputs.append(attention(queries, k, v, scale, F.pad(seen, (1, 0), value=True)))
        return torch.cat(outputs)[..., :-_WIDENED]
