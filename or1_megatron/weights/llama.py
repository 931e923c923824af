"""Llama 2 and 3 (DeepSeek-R1-Distill-Llama among them): no biases; from 3.1 on RoPE frequencies scaled by bands."""

from __future__ import annotations

from or1_megatron.weights.decoder import DENSE_LAYER, EMBEDDING, FINAL_NORM, OUTPUT, decoder_conflicts
from or1_megatron.weights.table import ModelFamily

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    before=(EMBEDDING,),
    layers=DENSE_LAYER,
    after=(FINAL_NORM, OUTPUT),
    conflicts=decoder_conflicts,
)
