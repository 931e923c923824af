"""GLM-4.5 (and 4.6, 4.7): RoPE on half of each head, query/key norms (except Air), DeepSeek-V3's mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from or1_megatron.weights.decoder import ATTENTION, QK_NORM, QKV_BIAS, decoder_conflicts
from or1_megatron.weights.sigmoid_mixture import SIGMOID_MIXTURE, sigmoid_conflicts, sigmoid_experts
from or1_megatron.weights.table import HFConfig, ModelFamily


def _conflicts(hf: HFConfig) -> Iterator[str]:
    yield from decoder_conflicts(hf, "attention_bias", "partial_rotary_factor")
    yield from sigmoid_conflicts(hf)


GLM4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    layers=(
        *ATTENTION,
        replace(QKV_BIAS, in_layer=lambda hf, layer: bool(hf.get("attention_bias"))),
        *(replace(row, in_layer=lambda hf, layer: bool(hf.get("use_qk_norm"))) for row in QK_NORM),
        *SIGMOID_MIXTURE,
    ),
    conflicts=_conflicts,
    experts=sigmoid_experts,
)
