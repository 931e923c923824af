"""The policy network: translates an HF config to Megatron's config, and makes the chunks of Megatron's HybridModel.

Shapes: T packed tokens, H hidden size, V padded vocabulary; context parallelism cuts T by CP, and between layers
sequence parallelism cuts T / CP by TP.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    GPTCompatLayerMaps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.latent_attention import LatentAttention
from or1_megatron.parallel.layers import decoder_spec, final_norm
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.packed import PackedRotary, PackedRow
from or1_megatron.parallel.weight_gradient import use_own_weight_gradient
from or1_megatron.sizing.parallel_layouts import LayerKind
from or1_megatron.weights.rope import rope_frequencies, rope_parameters
from or1_megatron.weights.table import DELTA_NET_SIZES, ModelFamily, has_latents

LAYER_SYMBOL = {
    (False, False): Symbols.ATTENTION,
    (False, True): Symbols.MOE,
    (True, False): Symbols.GDN,
    (True, True): Symbols.MLP,
}
"""Megatron's letter for a kind of layer, by (has linear attention, has experts)."""
TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    hf: Mapping[str, Any], family: ModelFamily, parallel: ParallelConfig, dtype: str, kind: LayerKind = "own"
) -> TransformerConfig:
    """Translate an HF config.json to Megatron's configuration."""
    use_own_weight_gradient()
    params_dtype, latents = TORCH_DTYPE[dtype], has_latents(hf)
    _, sharper = rope_frequencies(hf)
    kind_of_config: type[TransformerConfig] = TransformerConfig
    if latents:
        kind_of_config = MLATransformerConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = kind_of_config(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"],
            kv_channels=family.head_dim(hf),
            # Rotated queries and keys each get the factor, so their product gets its square.
            softmax_scale=None if sharper == 1.0 else sharper**2 / math.sqrt(family.head_dim(hf)),
            normalization="RMSNorm",
            layernorm_zero_centered_gamma=family.zero_centred,
            layernorm_epsilon=hf["rms_norm_eps"],
            gated_linear_unit=True,
            add_bias_linear=False,
            add_qkv_bias=family.has(hf, "self_attention.linear_qkv.bias"),
            qk_layernorm=latents or family.has(hf, "self_attention.q_layernorm.weight"),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            context_parallel_size=parallel.context,
            sequence_parallel=parallel.sequence,
            params_dtype=params_dtype,
            pipeline_dtype=params_dtype,
            bf16=params_dtype is torch.bfloat16,
            use_cpu_initialization=not torch.cuda.is_available(),
            perform_initialization=False,
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=True,
            masked_softmax_fusion=False,
            bias_activation_fusion=True,  # SwiGLU: one kernel for each direction, made by torch.compile
            bias_dropout_fusion=False,  # there is neither bias nor dropout after attention and MLP
            # Its kernel gets the angles of ``PackedRotary``; latent attention's makes its own.
            apply_rope_fusion=kind == "transformer_engine" and not latents,
            persist_layer_norm=False,
            # Where two ranks are each other's next and previous stage, batched sends get swapped.
            batch_p2p_comm=False,
            overlap_p2p_comm=parallel.virtual_pipeline > 1,
            recompute_granularity=None if parallel.recompute == "none" else parallel.recompute,
            recompute_modules=["mlp", "moe"],
            recompute_method="uniform" if parallel.recompute == "full" else None,
            recompute_num_layers=1 if parallel.recompute == "full" else None,
            deallocate_pipeline_outputs=False,
            **_experts_config(hf, family, parallel),
            **_delta_net_config(hf, family),
            **_latents_config(hf),
            **_gpt_oss_config(hf, family),
        )
    # Megatron refuses experts with biases under tensor parallelism; ``experts`` computes them.
    config.add_bias_linear = family.has(hf, "self_attention.linear_proj.bias")
    return config


def _experts_config(hf: Mapping[str, Any], family: ModelFamily, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the settings of a mixture of experts; {} for a dense model.

    There is no auxiliary loss, and the router's correction biases are not trained.
    """
    experts = family.experts(hf)
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.intermediate,
        # A softmax over only the chosen experts equals the softmax over all, scaled to sum to one.
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_enable_expert_bias": experts.sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.chosen_groups,
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_shared_expert_gate": family.has(hf, "shared_experts.gate_weight"),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.tensor,
    }


def _delta_net_config(hf: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """Return the settings of a delta net and of the gated attention in the other layers; {} without a delta net."""
    if family.delta_net(hf) is None:
        return {}
    return {"attention_output_gate": True, **{key: hf[key] for key in DELTA_NET_SIZES}}  # Megatron's names are HF's


def _latents_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    if not has_latents(hf):
        return {}
    rope = rope_parameters(hf)
    return {
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",  # whose place ``PackedRotary`` takes
        # These two sharpen attention.
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }


def _gpt_oss_config(hf: Mapping[str, Any], family: ModelFamily) -> dict[str, Any]:
    """Return the settings of softmax and activation. Only gpt-oss has sinks, sliding windows and a clamped SwiGLU."""
    if not family.has(hf, "core_attention.softmax_offset"):
        return {"activation_func": torch.nn.functional.silu}
    return {
        "softmax_type": "learnable",
        "window_size": (hf["sliding_window"] - 1, 0),  # before and after a token
        "window_attn_skip_freq": [int(layer in family.windowed(hf)) for layer in range(hf["num_hidden_layers"])],
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": hf["swiglu_limit"],
    }


def layer_pattern(chunk_layers: Sequence[range], sparse: Collection[int], linear: Collection[int] = ()) -> str:
    """Return Megatron's pattern of the whole model: a symbol per decoder layer, and "|" between the pipeline's chunks.

    Megatron counts attention and MLP as two layers. Here each symbol of ``LAYER_SYMBOL`` stands for one module that
    contains attention and MLP (``layers.decoder_spec``). So layers have the same indices as in HF, in checkpoints too.

    Args:
        chunk_layers: the layers of each chunk, in the model's order.
        sparse: indices of the layers with experts.
        linear: indices of the layers with linear attention.
    """
    return Symbols.PIPE.join(
        "".join(LAYER_SYMBOL[layer in linear, layer in sparse] for layer in chunk) for chunk in chunk_layers
    )


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Round ``vocab_size`` up to a multiple of ``tensor``, so that TP ranks hold equal parts."""
    return -(-vocab_size // tensor) * tensor


class PolicyModel(HybridModel):
    """A chunk of the model. The last chunk returns hidden states, from which ``kernels`` computes logits by tiles.

    Args:
        chunk_layers: the decoder layers of all chunks, in the model's order.
        index: the chunk's index on this pipeline stage; 0 unless the pipeline is interleaved.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        family: ModelFamily,
        config: TransformerConfig,
        mesh: Mesh,
        kind: LayerKind,
        chunk_layers: Sequence[range],
        index: int,
    ) -> None:
        experts, net = family.experts(hf), family.delta_net(hf)
        last = mesh.pipeline_rank + index * mesh.pipeline == len(chunk_layers) - 1
        super().__init__(
            config=config,
            hybrid_stack_spec=decoder_spec(kind, config),
            vocab_size=padded_vocabulary(hf["vocab_size"], mesh.tensor),
            max_sequence_length=hf["max_position_embeddings"],
            hybrid_layer_pattern=layer_pattern(
                chunk_layers, experts.layers if experts else (), net.layers if net else ()
            ),
            pre_process=mesh.first_stage and index == 0,
            post_process=last,
            vp_stage=index if config.virtual_pipeline_model_parallel_size else None,
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
            position_embedding_type="none",
        )
        self.rotary_pos_emb = PackedRotary(rope_frequencies(hf)[0], axes=1 if has_latents(hf) else 2)
        for module in self.modules():
            if isinstance(module, LatentAttention):
                module.rotary_pos_emb = self.rotary_pos_emb
        if last:
            self.decoder.final_layernorm = final_norm(kind)(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.true_vocab_size = int(hf["vocab_size"])
        self.alike = net is None and (experts is None or len(experts.layers) == config.num_layers)
        self.layers = chunk_layers[mesh.pipeline_rank + index * mesh.pipeline]

    def forward(self, token_ids: Tensor, row: PackedRow) -> Tensor:
        """Map [1, T / CP] token ids to [T / CP, 1, H] hidden states ([T / CP / TP, 1, H] with sequence parallelism)."""
        hidden: Tensor = self.decoder(
            hidden_states=self.embedding(token_ids, row.position_ids[None]) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=None if self.config.multi_latent_attention else self.rotary_pos_emb(row.position_ids),
            packed_seq_params=row,
        )
        return self.decoder.final_layernorm(hidden) if self.post_process else hidden

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Return what checkpoints save. If all layers are alike, tensors are stacked [layers, ...], as in GPTModel."""
        state: ShardedStateDict = super().sharded_state_dict(*args, **kwargs)
        if self.alike:
            same = {layer: layer for layer in range(self.config.num_layers)}
            retarget_sharded_state_dict_to_gpt_checkpoint(state, GPTCompatLayerMaps(same, {}, frozenset(), len(same)))
        return state

    def head_weight(self) -> Tensor:
        """Return the last stage's output weight [V / TP, H], which is the embedding in a tied model."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
