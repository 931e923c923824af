"""Llama 2 and 3 (DeepSeek-R1-Distill-Llama among them): no biases; from 3.1 on RoPE frequencies scaled by bands."""

from __future__ import annotations

from or1_megatron.weights.decoder import DENSE_LAYER, decoder_conflicts
from or1_megatron.weights.table import ModelFamily

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    layers=DENSE_LAYER,
    conflicts=decoder_conflicts,
)
