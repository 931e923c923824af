"""The weight table's rows that Llama-like decoders share, and the check for settings that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from or1_megatron.weights.layout import FusedQKV, GateUp
from or1_megatron.weights.rope import rotary_share
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import HFConfig, Row

HF: Final = "model.layers.{layer}."
MEGATRON: Final = "decoder.layers.{layer}."

INPUT_NORM = Row((HF + "input_layernorm.weight",), ("H",), MEGATRON + "input_layernorm.weight", Cut.WHOLE)
QKV = Row(
    tuple(f"{HF}self_attn.{x}_proj.weight" for x in "qkv"),
    ("QH", "KH", "KH"),
    MEGATRON + "self_attention.linear_qkv.weight",
    Cut.COLUMN,
    FusedQKV(),
)
ATTENTION_OUTPUT = Row(
    (HF + "self_attn.o_proj.weight",), ("HQ",), MEGATRON + "self_attention.linear_proj.weight", Cut.ROW
)
MLP_NORM = Row((HF + "post_attention_layernorm.weight",), ("H",), MEGATRON + "pre_mlp_layernorm.weight", Cut.WHOLE)
ATTENTION: Final = (INPUT_NORM, QKV, ATTENTION_OUTPUT, MLP_NORM)

_NORM_AND_LINEAR: Final = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""(norm, prefix of the norm's weight in the next linear). Megatron's TELayerNormColumnParallelLinear computes norm and
linear, and holds the norm's weight. The table and our checkpoints always use the norm's own name."""


def fused_names(name: str) -> Iterator[str]:
    """Yield the name that a norm's weight has if a linear holds the norm; yield nothing for other weights."""
    for norm, linear in _NORM_AND_LINEAR:
        if f".{norm}" in name:
            yield name.replace(norm, linear)


def unfused_name(name: str) -> str:
    """Return a weight's name in the table. A norm that a linear holds gets the name of a separate norm."""
    for norm, linear in _NORM_AND_LINEAR:
        name = name.replace(linear, norm)
    return name


def gated_mlp(hf: str, megatron: str, width: str) -> tuple[Row, Row]:
    """Return the rows of the MLP down(silu(gate x) * up x), from two name prefixes and the axis letter of its width."""
    return (
        Row(
            (hf + "gate_proj.weight", hf + "up_proj.weight"),
            (width + "H", width + "H"),
            megatron + "linear_fc1.weight",
            Cut.HALVES,
            GateUp(),
        ),
        Row((hf + "down_proj.weight",), ("H" + width,), megatron + "linear_fc2.weight", Cut.ROW),
    )


DENSE_MLP: Final = gated_mlp(HF + "mlp.", MEGATRON + "mlp.", "F")
DENSE_LAYER: Final = (*ATTENTION, *DENSE_MLP)
ROUTER: Final = Row((HF + "mlp.gate.weight",), ("EH",), MEGATRON + "mlp.router.weight", Cut.WHOLE)
EXPERT: Final = gated_mlp(HF + "mlp.experts.{expert}.", MEGATRON + "mlp.experts.local_experts.{expert}.", "X")
SHARED_EXPERT: Final = gated_mlp(HF + "mlp.shared_experts.", MEGATRON + "mlp.shared_experts.", "S")


def mixture(sparse: Callable[[HFConfig, int], bool], *more: Row) -> tuple[Row, ...]:
    """Return the MLPs' rows: router, experts and ``more`` in ``sparse`` layers, and a dense MLP in all other layers."""
    return (
        *(replace(row, in_layer=lambda hf, layer: not sparse(hf, layer)) for row in DENSE_MLP),
        *(replace(row, in_layer=sparse) for row in (ROUTER, *more, *EXPERT)),
    )


QKV_BIAS = replace(
    QKV,
    hf=tuple(f"{HF}self_attn.{x}_proj.bias" for x in "qkv"),
    axes=("Q", "K", "K"),
    megatron=MEGATRON + "self_attention.linear_qkv.bias",
)
QK_NORM: Final = tuple(
    Row((f"{HF}self_attn.{x}_norm.weight",), ("D",), f"{MEGATRON}self_attention.{x}_layernorm.weight", Cut.WHOLE)
    for x in "qk"
)


def decoder_conflicts(hf: HFConfig, *computed: str) -> Iterator[str]:
    """Yield a sentence for each unsupported setting of a Llama-like family that supports the keys ``computed``."""
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        yield f"hidden_act = '{activation}' is not supported; expected 'silu'"
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key) and key not in computed:
            yield f"{key} = true is not supported: its biases have no rows in the weight table; expected false"
    if rotary_share(hf) != 1.0 and "partial_rotary_factor" not in computed:
        yield f"partial_rotary_factor = {rotary_share(hf)} is not supported; expected 1.0: the whole head is rotated"
    if "sliding_attention" in (hf.get("layer_types") or ()) and "layer_types" not in computed:
        yield "layer_types holds 'sliding_attention', which is not supported; expected full attention in all layers"


def switched_window_conflicts(hf: HFConfig, *computed: str) -> Iterator[str]:
    """Yield a sentence for each unsupported setting of a family that has the switch ``use_sliding_window``."""
    yield from decoder_conflicts(hf, *computed)
    if hf.get("use_sliding_window"):
        yield "use_sliding_window = true is not supported; expected full attention in all layers"
