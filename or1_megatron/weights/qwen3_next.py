"""Qwen3-Next and the text models of Qwen3.5: in most layers a gated delta net, every few layers full attention.

The full attention's output is gated, and part of each head is rotated. Norms are zero-centred (x / rms(x) * (1 + w)),
except the norm of the delta net's output. In mixtures of experts, a gated shared expert computes every token.
Qwen3.5 is published inside models for images; ``families`` refuses such a folder and says how to get the text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from or1_megatron.weights.decoder import (
    ATTENTION_OUTPUT,
    DENSE_MLP,
    HF,
    INPUT_NORM,
    MEGATRON,
    MLP_NORM,
    QK_NORM,
    QKV,
    gated_mlp,
    mixture,
    switched_window_conflicts,
)
from or1_megatron.weights.layout import GatedQKV, HeadBlocks
from or1_megatron.weights.qwen3_moe import softmax_experts, sparse
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import DELTA_NET_SIZES, DeltaNet, Experts, HFConfig, ModelFamily, Row

_ONLY: Final = {"attn_output_gate": True, "layer_scale": False, "qkv_bias": False, "is_causal": True}
"""Keys that vLLM reads and transformers does not, each with the only value that is supported."""


def full_attention(hf: HFConfig, layer: int) -> bool:
    kinds = hf.get("layer_types")
    return kinds[layer] == "full_attention" if kinds else (layer + 1) % hf.get("full_attention_interval", 4) == 0


def _linear(hf: HFConfig, layer: int) -> bool:
    return not full_attention(hf, layer)


def delta_net(hf: HFConfig) -> DeltaNet:
    return DeltaNet(
        **{key.removeprefix("linear_").removeprefix("num_"): hf[key] for key in DELTA_NET_SIZES},
        layers=tuple(layer for layer in range(hf["num_hidden_layers"]) if _linear(hf, layer)),
    )


def hybrid_conflicts(hf: HFConfig, **only: Any) -> Iterator[str]:
    """Yield a sentence for each unsupported setting. ``only`` has further keys, each with its only supported value."""
    yield from switched_window_conflicts(hf, "partial_rotary_factor")
    if missing := [key for key in DELTA_NET_SIZES if not isinstance(hf.get(key), int)]:
        yield f"config.json lacks {', '.join(missing)}: numbers of the gated delta net"
    for key, value in {**_ONLY, **only}.items():
        if hf.get(key, value) != value:
            yield f"{key} = {hf[key]} is not supported; expected {value}"


def in_layers(kind: Any, *rows: Row) -> tuple[Row, ...]:
    return tuple(replace(row, in_layer=kind) for row in rows)


def linear_attention(projections: Mapping[str, str], layout: HeadBlocks) -> tuple[Row, ...]:
    """Return the weight table's rows of the delta net. ``projections`` maps HF names to axis letters, in order."""
    net, there = HF + "linear_attn.", MEGATRON + "self_attention."
    return in_layers(
        _linear,
        Row(
            tuple(f"{net}{name}.weight" for name in projections),
            tuple(f"{letter}H" for letter in projections.values()),
            there + "in_proj.weight",
            Cut.COLUMN,
            layout,
        ),
        Row((net + "conv1d.weight",), ("C1T",), there + "conv1d_weight", Cut.COLUMN, HeadBlocks(("kkv",))),
        Row((net + "dt_bias",), ("N",), there + "dt_bias", Cut.COLUMN),
        Row((net + "A_log",), ("N",), there + "A_log", Cut.COLUMN),
        Row((net + "norm.weight",), ("B",), there + "norm_weight", Cut.WHOLE),
        Row((net + "out_proj.weight",), ("HW",), there + "out_proj.weight", Cut.ROW),
    )


GATED_ATTENTION: Final = in_layers(
    full_attention, replace(QKV, axes=("GH", "KH", "KH"), layout=GatedQKV()), ATTENTION_OUTPUT, *QK_NORM
)
SHARED_EXPERT: Final = (
    *gated_mlp(HF + "mlp.shared_expert.", MEGATRON + "mlp.shared_experts.", "S"),
    Row((HF + "mlp.shared_expert_gate.weight",), ("1H",), MEGATRON + "mlp.shared_experts.gate_weight", Cut.WHOLE),
)


def shared_experts(hf: HFConfig) -> Experts:
    return replace(softmax_experts(hf), shared=hf["shared_expert_intermediate_size"])


FUSED_NET: Final = linear_attention({"in_proj_qkvz": "P", "in_proj_ba": "Z"}, HeadBlocks(("KKVV", "NN")))
SEPARATE_NET: Final = linear_attention(
    {"in_proj_qkv": "C", "in_proj_z": "W", "in_proj_b": "N", "in_proj_a": "N"}, HeadBlocks(("kkv", "v", "n", "n"))
)


def _family(architecture: str, *layers: Row, **others: Any) -> ModelFamily:
    defaults = {"partial_rotary_factor": 0.25, "norm_topk_prob": True, **others.pop("defaults", {})}
    return ModelFamily(
        architecture=architecture,
        layers=(INPUT_NORM, *GATED_ATTENTION, MLP_NORM, *layers),
        **{"conflicts": hybrid_conflicts, **others},
        delta_net=delta_net,
        zero_centred=True,
        defaults=defaults,
    )


QWEN3_NEXT = _family("Qwen3NextForCausalLM", *FUSED_NET, *mixture(sparse, *SHARED_EXPERT), experts=shared_experts)
QWEN3_5 = _family("Qwen3_5ForCausalLM", *SEPARATE_NET, *DENSE_MLP)
QWEN3_5_MOE = _family(
    "Qwen3_5MoeForCausalLM",
    *SEPARATE_NET,
    *mixture(sparse, *SHARED_EXPERT),
    experts=shared_experts,
    conflicts=partial(hybrid_conflicts, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    defaults={"intermediate_size": 1},  # which no layer uses
)
