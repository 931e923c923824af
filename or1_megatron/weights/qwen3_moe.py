"""Qwen3-MoE: Qwen3's attention, and in most layers a router that sends each token to a few of many experts."""

from __future__ import annotations

from or1_megatron.weights.decoder import ATTENTION, QK_NORM, mixture, switched_window_conflicts
from or1_megatron.weights.table import Experts, HFConfig, ModelFamily


def sparse(hf: HFConfig, layer: int) -> bool:
    return layer not in (hf.get("mlp_only_layers") or ()) and (layer + 1) % hf.get("decoder_sparse_step", 1) == 0


def softmax_experts(hf: HFConfig) -> Experts:
    return Experts(
        count=hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],
        chosen=hf["num_experts_per_tok"],
        intermediate=hf["moe_intermediate_size"],
        normalised=bool(hf.get("norm_topk_prob", False)),
        layers=tuple(layer for layer in range(hf["num_hidden_layers"]) if sparse(hf, layer)),
    )


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    layers=(*ATTENTION, *QK_NORM, *mixture(sparse)),
    conflicts=switched_window_conflicts,
    experts=softmax_experts,
)
