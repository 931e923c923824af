"""Qwen3, dense: queries and keys normed head by head, a separate head dimension, no biases."""

from __future__ import annotations

from or1_megatron.weights.decoder import DENSE_LAYER, QK_NORM, switched_window_conflicts
from or1_megatron.weights.table import ModelFamily

QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    layers=(*DENSE_LAYER, *QK_NORM),
    qk_norm=True,
    conflicts=switched_window_conflicts,
)
