"""gpt-oss (20b, 120b): attention sinks, a sliding window in every other layer, biases, experts with a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from or1_megatron.weights.decoder import (
    ATTENTION,
    ATTENTION_OUTPUT,
    HF,
    MEGATRON,
    QKV_BIAS,
    ROUTER,
    decoder_conflicts,
)
from or1_megatron.weights.layout import GateUp
from or1_megatron.weights.rope import rope_parameters
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import Experts, HFConfig, ModelFamily, Row

_ONLY: Final[dict[str, Any]] = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Keys with the only value supported, which vLLM computes whatever the config says."""
_ROPE: Final = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_STACKS: Final = HF + "mlp.experts."
_EXPERT: Final = MEGATRON + "mlp.experts.local_experts.{expert}."


def _conflicts(hf: HFConfig) -> Iterator[str]:
    yield from decoder_conflicts(hf, "attention_bias", "layer_types")
    if missing := [key for key in ("num_local_experts", "num_experts_per_tok") if not isinstance(hf.get(key), int)]:
        yield f"config.json lacks {', '.join(missing)}; expected a number for each"
    for key, only in _ONLY.items():
        if hf.get(key, only) != only:
            yield f"{key} = {hf[key]} is not supported; expected {only}"
    kinds = [("full_attention", "sliding_attention")[layer % 2 == 0] for layer in range(hf["num_hidden_layers"])]
    if hf.get("layer_types") != kinds:
        yield "layer_types is not sliding_attention and full_attention in turn, which vLLM computes whatever it says"
    if not isinstance(hf.get("sliding_window"), int):
        yield f"sliding_window = {hf.get('sliding_window')} is not supported; expected a number of tokens"
    rope = rope_parameters(hf)
    if rope["rope_type"] != "yarn" or (lacking := [key for key in _ROPE if key not in rope]):
        yield f"RoPE scaling of type '{rope['rope_type']}' lacks {lacking if rope['rope_type'] == 'yarn' else 'yarn'}"
    if ignored := [key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key) is not None]:
        yield f"{', '.join(ignored)} of RoPE scaling is not supported: vLLM ignores it in this model"


def _experts(hf: HFConfig) -> Experts:
    return Experts(
        count=hf["num_local_experts"],
        chosen=hf["num_experts_per_tok"],
        intermediate=hf["intermediate_size"],
        normalised=True,
        layers=tuple(range(hf["num_hidden_layers"])),
        clamp=_ONLY["swiglu_limit"],
    )


SINKS = Row((HF + "self_attn.sinks",), ("M",), MEGATRON + "self_attention.core_attention.softmax_offset", Cut.COLUMN)
_ROUTER_NAME: Final = HF + "mlp.router."

GPT_OSS = ModelFamily(
    architecture="GptOssForCausalLM",
    layers=(
        *ATTENTION,
        QKV_BIAS,
        replace(
            ATTENTION_OUTPUT,
            hf=(HF + "self_attn.o_proj.bias",),
            axes=("H",),
            megatron=MEGATRON + "self_attention.linear_proj.bias",
            cut=Cut.WHOLE,
        ),
        SINKS,
        replace(ROUTER, hf=(_ROUTER_NAME + "weight",)),
        replace(ROUTER, hf=(_ROUTER_NAME + "bias",), axes=("E",), megatron=MEGATRON + "mlp.router.bias"),
        *(
            Row(
                tuple(f"{_STACKS}gate_up_proj{kind}[{{expert}}, {first}::2]" for first in range(2)),
                (axes, axes),
                f"{_EXPERT}linear_fc1.{name}",
                Cut.HALVES,
                GateUp(),
            )
            for kind, axes, name in (("", "XH", "weight"), ("_bias", "X", "bias"))
        ),
        Row((_STACKS + "down_proj[{expert}, 0::1]",), ("HX",), _EXPERT + "linear_fc2.weight", Cut.ROW),
        Row((_STACKS + "down_proj_bias[{expert}, 0::1]",), ("H",), _EXPERT + "linear_fc2.bias", Cut.WHOLE),
    ),
    conflicts=_conflicts,
    experts=_experts,
)
