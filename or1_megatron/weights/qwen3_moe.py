"""Qwen3-MoE: Qwen3's attention; in most layers a router sends each token to a few of many small gated MLPs."""

from __future__ import annotations

from dataclasses import replace

from or1_megatron.weights.decoder import (
    ATTENTION,
    DENSE_MLP,
    HF,
    MEGATRON,
    QK_NORM,
    gated_mlp,
    switched_window_conflicts,
)
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import Experts, HFConfig, ModelFamily, Row


def sparse(hf: HFConfig, layer: int) -> bool:
    """Return whether a layer has experts."""
    return layer not in (hf.get("mlp_only_layers") or ()) and (layer + 1) % hf.get("decoder_sparse_step", 1) == 0


def dense(hf: HFConfig, layer: int) -> bool:
    return not sparse(hf, layer)


def _experts(hf: HFConfig) -> Experts:
    return Experts(
        count=hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],
        chosen=hf["num_experts_per_tok"],
        intermediate=hf["moe_intermediate_size"],
        normalised=bool(hf.get("norm_topk_prob", False)),
        layers=tuple(layer for layer in range(hf["num_hidden_layers"]) if sparse(hf, layer)),
    )


ROUTER = Row((HF + "mlp.gate.weight",), ("EH",), MEGATRON + "mlp.router.weight", Cut.WHOLE, in_layer=sparse)
EXPERT = tuple(
    replace(row, in_layer=sparse)
    for row in gated_mlp(HF + "mlp.experts.{expert}.", MEGATRON + "mlp.experts.local_experts.{expert}.", "X")
)
LAYER_MLP = (*(replace(row, in_layer=dense) for row in DENSE_MLP), ROUTER, *EXPERT)

QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    layers=(*ATTENTION, *QK_NORM, *LAYER_MLP),
    qk_norm=True,
    conflicts=switched_window_conflicts,
    experts=_experts,
)
