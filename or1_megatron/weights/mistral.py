"""Mistral: Llama's tensors. Up to 7B-v0.1 attention sees a sliding window only, which is not supported here."""

from __future__ import annotations

from collections.abc import Iterator

from or1_megatron.weights.decoder import DENSE_LAYER, decoder_conflicts
from or1_megatron.weights.table import HFConfig, ModelFamily


def _conflicts(hf: HFConfig) -> Iterator[str]:
    yield from decoder_conflicts(hf)
    window = hf.get("sliding_window", 4096)  # transformers' default
    if window is not None and window < hf["max_position_embeddings"]:
        yield (
            f"sliding_window = {window} is not supported: it is shorter than max_position_embeddings = "
            f"{hf['max_position_embeddings']}; expected null, as from Mistral-7B-v0.2 on, or a window that never cuts"
        )


MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    layers=DENSE_LAYER,
    conflicts=_conflicts,
)
