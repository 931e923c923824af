"""Qwen2 (DeepSeek-R1-Distill-Qwen among them): query/key/value biases, gated MLP, RMSNorm."""

from __future__ import annotations

from or1_megatron.weights.decoder import DENSE_LAYER, QKV_BIAS, switched_window_conflicts
from or1_megatron.weights.table import ModelFamily

QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    layers=(*DENSE_LAYER, QKV_BIAS),
    qkv_bias=True,
    conflicts=switched_window_conflicts,
)
