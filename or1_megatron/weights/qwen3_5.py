"""The text models of Qwen3.5, dense: Qwen3-Next's layers with the delta net's projections in four tensors."""

from __future__ import annotations

from or1_megatron.weights.decoder import DENSE_MLP, INPUT_NORM, MLP_NORM
from or1_megatron.weights.layout import HeadBlocks
from or1_megatron.weights.qwen3_next import GATED_ATTENTION, delta_net, hybrid_conflicts, linear_attention
from or1_megatron.weights.table import ModelFamily

PROJECTIONS = {"in_proj_qkv": "C", "in_proj_z": "W", "in_proj_b": "N", "in_proj_a": "N"}
QWEN3_5 = ModelFamily(
    architecture="Qwen3_5ForCausalLM",
    layers=(
        INPUT_NORM,
        *linear_attention(PROJECTIONS, HeadBlocks(("kkv", "v", "n", "n"))),
        *GATED_ATTENTION,
        MLP_NORM,
        *DENSE_MLP,
    ),
    conflicts=hybrid_conflicts,
    delta_net=delta_net,
    zero_centred=True,
    defaults={"partial_rotary_factor": 0.25},
)
