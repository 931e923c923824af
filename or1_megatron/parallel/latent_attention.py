"""Multi-head latent attention of packed rows: Megatron's module, with what our rows and cuts need.

Shapes: T row tokens of this rank, L latents of keys and values, R dimensions of the keys' rotated part.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor


class LatentAttention(MLASelfAttention):
    """Queries, keys and values made of low-rank latents (arXiv 2405.04434). Its rotary module is the model's."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Take what the spec names: Megatron would norm what queries without latents are made of."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents of queries, and those of keys and values with the keys' rotated part.

        Tensor parallelism cuts the latter's L + R columns. Here they are joined and their tokens cut instead, as by
        sequence parallelism: only then does Megatron sum the rotated part's gradient over the ranks' heads.
        """
        query, latents = super()._qkv_down_projection(hidden_states)
        if self.config.tensor_model_parallel_size > 1:
            latents = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(latents))
        return query, latents

    def _run_core_attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Give [T, N, D] queries and keys and [T, N, V] values the axis for batches that our attention expects."""
        out: Tensor = super()._run_core_attention(query[:, None], key[:, None], value[:, None], *args, **kwargs)
        return out
