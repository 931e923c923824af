"""Rotary position embeddings (RoPE, YaRN) from HF configs: the frequencies, and the factor that sharpens attention.

Shapes: R rotated dimensions of a head: all dimensions, or the first ones. A position rotates the pair
(i, i + R/2) by position * frequency[i].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from or1_megatron.weights.table import HFConfig, ModelFamily, has_latents

_NEEDED: Final = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""The known types of RoPE scaling, each with the keys that it needs."""


def rope_parameters(hf: HFConfig) -> dict[str, Any]:
    """Return the RoPE parameters, which HF configs keep in ``rope_scaling`` or ``rope_parameters``.

    The result always has ``rope_type`` and ``rope_theta``.
    """
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    theta = rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0
    return {**rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default", "rope_theta": float(theta)}


def rope_conflicts(hf: HFConfig) -> Iterator[str]:
    """Yield a sentence for each unsupported RoPE setting of a model."""
    rope = rope_parameters(hf)
    kind = rope["rope_type"]
    if nested := sorted(key for key, value in rope.items() if isinstance(value, Mapping)):
        yield f"RoPE parameters by kind of layer ({', '.join(nested)}) are not supported; expected one set for all"
        return
    if kind not in _NEEDED:
        yield f"RoPE scaling of type '{kind}' is not supported; expected one of {', '.join(_NEEDED)}"
        return
    if missing := [key for key in _NEEDED[kind] if key not in rope]:
        yield f"RoPE scaling of type '{kind}' lacks {', '.join(missing)}"
    if rope.get("attn_factor", 1.0) != 1.0:
        yield (
            f"attn_factor = {rope['attn_factor']} of RoPE scaling is not supported: vLLM multiplies attention by it, "
            "and transformers ignores it; expected attention_factor"
        )


def rotary_share(hf: HFConfig) -> float:
    """Return the share of each head's dimensions that are rotated. The rotated dimensions come first."""
    unset = 0.5 if hf.get("model_type") == "glm4_moe" else 1.0  # as in transformers
    return float(rope_parameters(hf).get("partial_rotary_factor") or hf.get("partial_rotary_factor") or unset)


def rope_frequencies(hf: HFConfig) -> tuple[Tensor, float]:
    """Return ([R/2] fp32 frequencies in radians per token, factor that multiplies rotated queries and rotated keys).

    Sources: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); Llama 3's bands (arXiv 2407.21783 and
    its released code); YaRN (arXiv 2309.00071, section 3.2 and 3.4).

    Raises:
        ValueError: the RoPE scaling is of an unknown type, or lacks a parameter.
    """
    for problem in rope_conflicts(hf):
        raise ValueError(problem)
    rope = rope_parameters(hf)
    rotated = hf["qk_rope_head_dim"] if has_latents(hf) else int(ModelFamily.head_dim(hf) * rotary_share(hf))
    exponent = torch.arange(0, rotated, 2, dtype=torch.int64).to(torch.float32) / rotated
    plain = 1.0 / (rope["rope_theta"] ** exponent)
    return _SCALED[rope["rope_type"]](plain, rope, hf)


def context_tokens(hf: HFConfig) -> int:
    """Return the model's longest sequence in tokens, as vLLM computes it. Linear scaling and YaRN lengthen it."""
    rope = rope_parameters(hf)
    if rope["rope_type"] == "yarn":
        return int(_original_positions(rope, hf) * (rope.get("factor") or 1.0))
    return int(hf["max_position_embeddings"] * (rope["factor"] if rope["rope_type"] == "linear" else 1.0))


def _llama3(plain: Tensor, rope: Mapping[str, Any], hf: HFConfig) -> tuple[Tensor, float]:
    """Divide slow frequencies by ``factor``, keep fast ones, and blend both values for the frequencies in between."""
    turns = _original_positions(rope, hf) * plain / (2 * math.pi)  # full turns of each pair over the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / rope["factor"] + kept * plain, 1.0


def _yarn(plain: Tensor, rope: Mapping[str, Any], hf: HFConfig) -> tuple[Tensor, float]:
    """Return (frequencies, attention's factor). Unlike in ``_llama3``, the blend is linear in the pair's index."""
    positions, pairs = _original_positions(rope, hf), len(plain)
    factor = rope["factor"] or hf["max_position_embeddings"] / positions

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(positions / (times * 2 * math.pi)) / math.log(rope["rope_theta"])

    first, last = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    index = torch.arange(pairs, dtype=torch.float32)
    kept = 1 - ((index - first) / (last - first if last > first else 0.001)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    def sharpness(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpness(rope["mscale"]) / sharpness(rope["mscale_all_dim"])
    return sharpness(1.0)


def _original_positions(rope: Mapping[str, Any], hf: HFConfig) -> int:
    """Return the context length in tokens of pre-training, before RoPE scaling."""
    outside = hf.get("original_max_position_embeddings")
    return int(outside or rope.get("original_max_position_embeddings") or hf["max_position_embeddings"])


_SCALED: Final[dict[str, Callable[[Tensor, Mapping[str, Any], HFConfig], tuple[Tensor, float]]]] = {
    "default": lambda plain, rope, hf: (plain, 1.0),
    "linear": lambda plain, rope, hf: (plain / rope["factor"], 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
}
