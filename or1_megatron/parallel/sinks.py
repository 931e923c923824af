"""Attention with sinks, in gpt-oss: each head's softmax has one more logit, a trained number, that no value belongs to.

In every other layer a token sees only the last tokens, a sliding window. Transformer Engine computes no sinks for
packed rows (its ``get_attention_backend`` has none for ``thd``), so its layers have this attention too.

Shapes as in ``packed``; l queries, which are the last of m tokens of a sequence.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from or1_megatron.parallel.packed import PackedCausalAttention

_BLOCK: Final = 1024
"""Queries that are computed at once; their mask is all that is held of the others'."""
_PADDING: Final = 8
"""Channels by which heads are widened, of which the first is needed: kernels want multiples of 8."""


class SinkAttention(PackedCausalAttention):
    """A layer's core attention with sinks, and with a window where ``config`` says so."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, softmax_scale=softmax_scale)
        self._tensor = pg_collection.tp
        heads = config.num_attention_heads // self._tensor.size()
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))  # Megatron's name
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if windowed and config.window_size else None
        """How many tokens a token sees, itself among them."""

    def chunk(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Put the sinks' logits in as those of one more key, first of all, whose value is zero."""
        before, scale = len(key) - len(query), self.softmax_scale or query.shape[-1] ** -0.5
        sinks = self.softmax_offset.to(query.dtype)[None, :, None].expand(len(query), -1, 1)
        query = F.pad(torch.cat((query, sinks), dim=-1), (0, _PADDING - 1))
        key, value = (F.pad(x, (0, _PADDING, 0, 0, 1, 0)) for x in (key, value))
        of_sink = torch.zeros_like(key[:1])
        of_sink[..., -_PADDING] = 1 / scale
        key = torch.cat((of_sink, key[1:]))
        outputs = []
        for first in range(0, len(query), _BLOCK):
            queries = query[first : first + _BLOCK]
            end = before + first + len(queries)
            begin = 0 if self._window is None else max(0, before + first + 1 - self._window)
            seen = torch.ones(len(queries), end - begin, dtype=torch.bool, device=query.device)
            seen = seen.tril(before + first - begin)
            if self._window is not None:
                seen = seen.triu(before + first - begin + 1 - self._window)
            keys, values = (torch.cat((x[:1], x[1 + begin : 1 + end])) if begin else x[: 1 + end] for x in (key, value))
            q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))  # [1, heads, tokens, D]
            grouped = q.shape[1] != k.shape[1]
            mask = F.pad(seen, (1, 0), value=True)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
            outputs.append(out[0].transpose(0, 1)[..., :-_PADDING])
        return torch.cat(outputs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        own, cut = {"softmax_offset": self.softmax_offset}, {"softmax_offset": 0}
        groups = {"tp_group": self._tensor, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets, **groups)
        return state
