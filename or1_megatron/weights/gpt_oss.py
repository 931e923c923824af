"""gpt-oss: attention sinks, a sliding window in alternate layers, biases, experts with a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from or1_megatron.weights.decoder import ATTENTION, ATTENTION_OUTPUT, HF, MEGATRON, QKV_BIAS, ROUTER, decoder_conflicts
from or1_megatron.weights.layout import GateUp
from or1_megatron.weights.rope import rope_parameters
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import Experts, HFConfig, ModelFamily, Row

_ONLY: Final[dict[str, Any]] = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Each key's only supported value. vLLM uses these values and those of ``_ROPE``, whatever the config says."""
_ROPE: Final = {"rope_type": "yarn", "attention_factor": None, "mscale": None, "mscale_all_dim": None}
_NEEDED: Final = ("num_local_experts", "num_experts_per_tok", "sliding_window")
_NEEDED_OF_ROPE: Final = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def _conflicts(hf: HFConfig) -> Iterator[str]:
    yield from decoder_conflicts(hf, "attention_bias", "layer_types")
    rope = rope_parameters(hf)
    of_rope = (key for key in _NEEDED_OF_ROPE if not isinstance(rope.get(key), int | float))
    if missing := [*(key for key in _NEEDED if not isinstance(hf.get(key), int)), *of_rope]:
        yield f"config.json lacks {', '.join(missing)}; expected a number for each"
    for held, supported in ((hf, _ONLY), (rope, _ROPE)):
        for key, only in supported.items():
            if held.get(key, only) != only:
                yield f"{key} = {held[key]} is not supported; expected {only}"
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(hf["num_hidden_layers"])]
    if hf.get("layer_types") not in (None, kinds):  # transformers reads None as these
        yield f"layer_types is not supported; expected {', '.join(kinds[:2])} and so on in turn, as vLLM computes"


def _experts(hf: HFConfig) -> Experts:
    layers = tuple(range(hf["num_hidden_layers"]))
    return Experts(hf["num_local_experts"], hf["num_experts_per_tok"], hf["intermediate_size"], True, layers)


def _bias(row: Row, hf: str, axes: str, cut: Cut = Cut.WHOLE) -> Row:
    return replace(row, hf=(HF + hf,), axes=(axes,), megatron=row.megatron.removesuffix("weight") + "bias", cut=cut)


def _of_expert(hf: str, axes: tuple[str, ...], megatron: str, *cut_and_layout: Any) -> Row:
    """Return an expert's row. Its HF tensors are the parts of the expert's entry in a stack (``stacked_experts``)."""
    parts = (f"{HF}mlp.experts.{hf}[{{expert}}, {first}::{len(axes)}]" for first in range(len(axes)))
    return Row(tuple(parts), axes, f"{MEGATRON}mlp.experts.local_experts.{{expert}}.{megatron}", *cut_and_layout)


_ROUTER: Final = replace(ROUTER, hf=(HF + "mlp.router.weight",))
_SINKS: Final = MEGATRON + "self_attention.core_attention.softmax_offset"
GPT_OSS = ModelFamily(
    architecture="GptOssForCausalLM",
    layers=(
        *(*ATTENTION, QKV_BIAS, _bias(ATTENTION_OUTPUT, "self_attn.o_proj.bias", "H")),
        Row((HF + "self_attn.sinks",), ("M",), _SINKS, Cut.COLUMN),
        *(_ROUTER, _bias(_ROUTER, "mlp.router.bias", "E")),
        _of_expert("gate_up_proj", ("XH", "XH"), "linear_fc1.weight", Cut.HALVES, GateUp()),
        _of_expert("gate_up_proj_bias", ("X", "X"), "linear_fc1.bias", Cut.HALVES, GateUp()),
        _of_expert("down_proj", ("HX",), "linear_fc2.weight", Cut.ROW),
        _of_expert("down_proj_bias", ("H",), "linear_fc2.bias", Cut.WHOLE),
    ),
    conflicts=_conflicts,
    experts=_experts,
    windowed=lambda hf: range(0, hf["num_hidden_layers"], 2),
    defaults={"swiglu_limit": 7.0},
)
