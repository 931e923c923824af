"""The text models of Qwen3.5: Qwen3-Next's layers with the delta net's projections in four tensors, dense or with
experts in all layers.

They are published inside of models for images, whose folders ``families`` refuses with the line that takes them out.
"""

from __future__ import annotations

from collections.abc import Iterator

from or1_megatron.weights.decoder import DENSE_MLP, INPUT_NORM, MLP_NORM, mixture
from or1_megatron.weights.layout import HeadBlocks
from or1_megatron.weights.qwen3_next import (
    GATED_ATTENTION,
    SHARED_EXPERT,
    delta_net,
    hybrid_conflicts,
    linear_attention,
    only_conflicts,
    shared_experts,
)
from or1_megatron.weights.table import HFConfig, ModelFamily

PROJECTIONS = {"in_proj_qkv": "C", "in_proj_z": "W", "in_proj_b": "N", "in_proj_a": "N"}
ATTENTION = (
    INPUT_NORM,
    *linear_attention(PROJECTIONS, HeadBlocks(("kkv", "v", "n", "n"))),
    *GATED_ATTENTION,
    MLP_NORM,
)


def _sparse_conflicts(hf: HFConfig) -> Iterator[str]:
    yield from hybrid_conflicts(hf)
    # transformers reads none of these here; vLLM reads the first.
    yield from only_conflicts(hf, {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []})


QWEN3_5 = ModelFamily(
    architecture="Qwen3_5ForCausalLM",
    layers=(*ATTENTION, *DENSE_MLP),
    conflicts=hybrid_conflicts,
    delta_net=delta_net,
    zero_centred=True,
    defaults={"partial_rotary_factor": 0.25},
)
QWEN3_5_MOE = ModelFamily(
    architecture="Qwen3_5MoeForCausalLM",
    layers=(*ATTENTION, *mixture(lambda hf, layer: True, *SHARED_EXPERT)),
    conflicts=_sparse_conflicts,
    experts=shared_experts,
    delta_net=delta_net,
    zero_centred=True,
    # No layer is dense: nothing uses the last.
    defaults={"partial_rotary_factor": 0.25, "norm_topk_prob": True, "intermediate_size": 1},
)
