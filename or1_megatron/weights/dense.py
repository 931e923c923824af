"""The dense families (Llama, Mistral, Qwen2, Qwen3), which differ in biases, query/key norms and attention windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from or1_megatron.weights.decoder import DENSE_LAYER, QK_NORM, QKV_BIAS, decoder_conflicts, switched_window_conflicts
from or1_megatron.weights.table import HFConfig, ModelFamily


def _mistral_conflicts(hf: HFConfig) -> Iterator[str]:
    yield from decoder_conflicts(hf)
    window = hf.get("sliding_window", 4096)  # transformers' default
    if window is not None and window < hf["max_position_embeddings"]:
        yield (
            f"sliding_window = {window} is not supported: it is shorter than max_position_embeddings = "
            f"{hf['max_position_embeddings']}; expected null, as from Mistral-7B-v0.2 on, or a window that never cuts"
        )


LLAMA: Final = ModelFamily("LlamaForCausalLM", DENSE_LAYER, decoder_conflicts)
"""Llama 2 and 3 (DeepSeek-R1-Distill-Llama among them): no biases; from 3.1 on RoPE frequencies scaled by bands."""
MISTRAL: Final = ModelFamily("MistralForCausalLM", DENSE_LAYER, _mistral_conflicts)
"""Llama's tensors. Attention of Mistral up to 7B-v0.1 sees only a sliding window, which is not supported here."""
QWEN2: Final = ModelFamily("Qwen2ForCausalLM", (*DENSE_LAYER, QKV_BIAS), switched_window_conflicts)
"""Qwen2 (DeepSeek-R1-Distill-Qwen among them): query/key/value biases, gated MLP, RMSNorm."""
QWEN3: Final = ModelFamily("Qwen3ForCausalLM", (*DENSE_LAYER, *QK_NORM), switched_window_conflicts)
"""Qwen3, dense: queries and keys normed head by head, a separate head dimension, no biases."""
