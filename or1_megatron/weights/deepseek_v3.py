"""DeepSeek-V3 (and R1, Moonlight, Kimi-K2): latent attention, and the mixture of experts of ``sigmoid_mixture``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from or1_megatron.weights.decoder import HF, INPUT_NORM, MEGATRON, MLP_NORM, decoder_conflicts
from or1_megatron.weights.rope import rope_conflicts, rope_frequencies
from or1_megatron.weights.sigmoid_mixture import SIGMOID_MIXTURE, sigmoid_conflicts, sigmoid_experts
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import HFConfig, ModelFamily, Row

_NEEDED: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _row(hf: str, axes: str, megatron: str, cut: Cut = Cut.COLUMN) -> Row:
    return Row((f"{HF}self_attn.{hf}.weight",), (axes,), f"{MEGATRON}self_attention.{megatron}.weight", cut)


def _has_query_latents(hf: HFConfig, layer: int) -> bool:
    return hf["q_lora_rank"] is not None


QUERY = _row("q_proj", "QH", "linear_q_proj")
QUERY_LATENTS = (
    _row("q_a_proj", "AH", "linear_q_down_proj"),
    _row("q_a_layernorm", "A", "q_layernorm", Cut.WHOLE),
    _row("q_b_proj", "QA", "linear_q_up_proj"),
)
LATENT_ATTENTION = (
    INPUT_NORM,
    replace(QUERY, in_layer=lambda hf, layer: not _has_query_latents(hf, layer)),
    *(replace(row, in_layer=_has_query_latents) for row in QUERY_LATENTS),
    _row("kv_a_proj_with_mqa", "RH", "linear_kv_down_proj"),
    _row("kv_a_layernorm", "L", "kv_layernorm", Cut.WHOLE),
    _row("kv_b_proj", "UL", "linear_kv_up_proj"),
    _row("o_proj", "HO", "linear_proj", Cut.ROW),
    MLP_NORM,
)


def _conflicts(hf: HFConfig) -> Iterator[str]:
    missing = [key for key in _NEEDED if not isinstance(hf.get(key), int)]
    if missing := missing + ["q_lora_rank"] * ("q_lora_rank" not in hf):
        yield f"config.json lacks {', '.join(missing)}; expected numbers, or null for q_lora_rank"
        return
    yield from decoder_conflicts(hf)
    yield from sigmoid_conflicts(hf)
    if not hf.get("rope_interleave", True):
        yield "rope_interleave = false is not supported; expected true"
    if not [*rope_conflicts(hf)] and rope_frequencies(hf)[1] != 1.0:
        yield "mscale of RoPE scaling differs from its mscale_all_dim, which is not supported; expected them equal"


DEEPSEEK_V3 = ModelFamily(
    architecture="DeepseekV3ForCausalLM",
    layers=(*LATENT_ATTENTION, *SIGMOID_MIXTURE),
    conflicts=_conflicts,
    experts=sigmoid_experts,
)
