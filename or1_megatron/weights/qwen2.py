"""Qwen2 (DeepSeek-R1-Distill-Qwen among them): query/key/value biases, gated MLP, RMSNorm."""

from __future__ import annotations

from or1_megatron.weights.layout import FusedQKV, GateUp, PaddedVocabulary
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import ModelFamily, Row, untied

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."

EMBEDDING = Row(
    ("model.embed_tokens.weight",), ("VH",), "embedding.word_embeddings.weight", Cut.VOCABULARY, PaddedVocabulary()
)
FINAL_NORM = Row(("model.norm.weight",), ("H",), "decoder.final_layernorm.weight", Cut.WHOLE)
OUTPUT = Row(("lm_head.weight",), ("VH",), "output_layer.weight", Cut.VOCABULARY, PaddedVocabulary(), when=untied)

DENSE_LAYER = (
    Row((_HF + "input_layernorm.weight",), ("H",), _MEGATRON + "input_layernorm.weight", Cut.WHOLE),
    Row(
        tuple(f"{_HF}self_attn.{x}_proj.weight" for x in "qkv"),
        ("QH", "KH", "KH"),
        _MEGATRON + "self_attention.linear_qkv.weight",
        Cut.COLUMN,
        FusedQKV(),
    ),
    Row((_HF + "self_attn.o_proj.weight",), ("HQ",), _MEGATRON + "self_attention.linear_proj.weight", Cut.ROW),
    Row((_HF + "post_attention_layernorm.weight",), ("H",), _MEGATRON + "pre_mlp_layernorm.weight", Cut.WHOLE),
    Row(
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        ("FH", "FH"),
        _MEGATRON + "mlp.linear_fc1.weight",
        Cut.HALVES,
        GateUp(),
    ),
    Row((_HF + "mlp.down_proj.weight",), ("HF",), _MEGATRON + "mlp.linear_fc2.weight", Cut.ROW),
)
QKV_BIAS = Row(
    tuple(f"{_HF}self_attn.{x}_proj.bias" for x in "qkv"),
    ("Q", "K", "K"),
    _MEGATRON + "self_attention.linear_qkv.bias",
    Cut.COLUMN,
    FusedQKV(),
)

QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    before=(EMBEDDING,),
    layers=(*DENSE_LAYER, QKV_BIAS),
    after=(FINAL_NORM, OUTPUT),
    qk_norm=False,
    qkv_bias=lambda hf: True,
)
