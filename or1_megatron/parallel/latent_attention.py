"""Multi-head latent attention (DeepSeek) on packed rows: Megatron's module, adapted to our sharding.

Shapes: T packed tokens of this rank; L latents of keys and values, R dimensions of the keys' rotated part; N heads, D
dimensions of a query or key, V dimensions of a value.
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
    """Makes queries, keys and values from low-rank latents (arXiv 2405.04434), with the model's own rotary module."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the spec's linears and norms. Megatron's own method would also norm the queries' input."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the queries' latents, the latents of keys and values together with the keys' rotated part).

        Megatron's method leaves the second tensor's L + R columns spread over TP. This method gathers the columns and
        cuts the tokens instead (sequence parallelism). Megatron then sums the rotated part's gradient over all heads.
        """
        query, latents = super()._qkv_down_projection(hidden_states)
        if self.config.tensor_model_parallel_size > 1:
            latents = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(latents))
        return query, latents

    def _run_core_attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention of [T, N, D] queries and keys and [T, N, V] values, after adding a batch axis of size 1."""
        out: Tensor = super()._run_core_attention(query[:, None], key[:, None], value[:, None], *args, **kwargs)
        return out
