"""The mixture of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), which GLM-4.5 also has.

The first layers are dense. In the others the router scores each expert by a sigmoid. A correction bias per expert, for
balanced load in pre-training, affects only the choice of experts. A shared expert computes every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from or1_megatron.weights.decoder import HF, MEGATRON, SHARED_EXPERT, mixture
from or1_megatron.weights.slicing import Cut
from or1_megatron.weights.table import Experts, HFConfig, Row

_NEEDED: Final = (
    *("first_k_dense_replace", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("routed_scaling_factor", "n_group", "topk_group"),
)
_ONLY: Final = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Each key's only supported value, which is also the default if a config lacks the key."""


def sparse(hf: HFConfig, layer: int) -> bool:
    return bool(layer >= hf["first_k_dense_replace"])


CORRECTION_BIAS = Row(
    (HF + "mlp.gate.e_score_correction_bias",), ("E",), MEGATRON + "mlp.router.expert_bias", Cut.WHOLE, float32=True
)
SIGMOID_MIXTURE: Final = mixture(sparse, CORRECTION_BIAS, *SHARED_EXPERT)


def sigmoid_experts(hf: HFConfig) -> Experts:
    limited = hf["topk_group"] < hf["n_group"]
    return Experts(
        count=hf["n_routed_experts"],
        chosen=hf["num_experts_per_tok"],
        intermediate=hf["moe_intermediate_size"],
        normalised=True,
        layers=tuple(layer for layer in range(hf["num_hidden_layers"]) if sparse(hf, layer)),
        shared=hf["n_shared_experts"] * hf["moe_intermediate_size"],
        sigmoid=True,
        scale=hf["routed_scaling_factor"],
        groups=hf["n_group"] if limited else None,
        chosen_groups=hf["topk_group"] if limited else None,
    )


def sigmoid_conflicts(hf: HFConfig) -> Iterator[str]:
    """Yield a sentence for each missing number and for each unsupported setting of the mixture."""
    if missing := [key for key in _NEEDED if not isinstance(hf.get(key), int | float)]:
        yield f"config.json lacks {', '.join(missing)}; expected a number for each"
        return
    for key, only in _ONLY.items():
        if hf.get(key, only) != only:
            yield f"{key} = {hf[key]} is not supported; expected {only}"
    chosen, groups = hf["num_experts_per_tok"], hf["topk_group"]
    if chosen < 2:
        yield f"num_experts_per_tok = {chosen} is not supported; expected at least 2, whose weights are normalised"
    if groups < hf["n_group"] and chosen // groups != 2:
        # Megatron judges a group by its best ``chosen // groups`` experts, the models by their best two.
        yield (
            f"topk_group = {groups} with num_experts_per_tok = {chosen} is not supported; expected half of "
            "num_experts_per_tok, or all n_group"
        )
    if hf["n_shared_experts"] < 1:
        yield f"n_shared_experts = {hf['n_shared_experts']} is not supported; expected at least 1"
