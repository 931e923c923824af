"""The policy network: makes Megatron's GPTModel of an HF config, with one pipeline stage on each rank.

Shapes: T packed tokens, H hidden size, V padded vocabulary; context parallelism cuts T by CP, and sequence parallelism
cuts the result by TP between layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.layers import layer_spec
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.packed import PackedRotary, PackedRow
from or1_megatron.parallel.weight_gradient import use_own_weight_gradient
from or1_megatron.sizing.parallel_layouts import LayerKind
from or1_megatron.weights.rope import rope_frequencies
from or1_megatron.weights.table import ModelFamily

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    hf: Mapping[str, Any], family: ModelFamily, parallel: ParallelConfig, dtype: str, kind: LayerKind = "own"
) -> TransformerConfig:
    """Translate an HF config.json to Megatron's configuration."""
    use_own_weight_gradient()
    params_dtype = TORCH_DTYPE[dtype]
    _, sharper = rope_frequencies(hf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"],
            kv_channels=family.head_dim(hf),
            # A factor on rotated queries and on rotated keys is its square on their product.
            softmax_scale=None if sharper == 1.0 else sharper**2 / math.sqrt(family.head_dim(hf)),
            normalization="RMSNorm",
            layernorm_epsilon=hf["rms_norm_eps"],
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=family.qkv_bias,
            qk_layernorm=family.qk_norm,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
            pipeline_model_parallel_layout=_uneven_layout(parallel, hf["num_hidden_layers"]),
            context_parallel_size=parallel.context,
            sequence_parallel=parallel.sequence,
            params_dtype=params_dtype,
            pipeline_dtype=params_dtype,
            bf16=params_dtype is torch.bfloat16,
            use_cpu_initialization=not torch.cuda.is_available(),
            perform_initialization=False,
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=True,
            tp_comm_overlap=parallel.overlap_tensor,
            masked_softmax_fusion=False,
            bias_activation_fusion=True,  # SwiGLU: one kernel for each direction, made by torch.compile
            bias_dropout_fusion=False,  # there is neither bias nor dropout after attention and MLP
            apply_rope_fusion=kind == "transformer_engine",  # by its kernel, with the angles of ``PackedRotary``
            persist_layer_norm=False,
            # Batched sends get swapped between two ranks that are each other's next and previous stage.
            batch_p2p_comm=False,
            overlap_p2p_comm=parallel.virtual_pipeline > 1,
            recompute_granularity=None if parallel.recompute == "none" else parallel.recompute,
            recompute_modules=["mlp", "moe"],
            recompute_method="uniform" if parallel.recompute == "full" else None,
            recompute_num_layers=1 if parallel.recompute == "full" else None,
            deallocate_pipeline_outputs=False,
            **_experts_config(hf, family, parallel),
        )


def _experts_config(hf: Mapping[str, Any], family: ModelFamily, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the settings of a mixture of experts, none for a dense model. There is no auxiliary loss."""
    experts = family.experts(hf)
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(hf["num_hidden_layers"])],
        # A softmax over the chosen experts alone is the softmax over all, scaled to sum to one.
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.tensor,
    }


def _uneven_layout(parallel: ParallelConfig, layers: int) -> list[list[str]] | None:
    """Return Megatron's list of what each chunk holds; None if all chunks hold the same number of layers."""
    if parallel.layers_per_stage is None:
        return None
    held = [["decoder"] * len(chunk) for chunk in parallel.chunk_layers(layers)]
    held[0].insert(0, "embedding")
    held[-1].append("loss")
    return held


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Return the number of vocabulary rows after padding, which all TP ranks share equally."""
    return -(-vocab_size // tensor) * tensor


class PolicyModel(GPTModel):
    """A chunk of the model. It ends in hidden states; ``kernels`` computes logits from them, tile by tile.

    Args:
        index: number of the chunk on this pipeline stage; 0 unless the pipeline is interleaved.
        layers: the decoder layers that it holds, numbered in the whole model.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        family: ModelFamily,
        config: TransformerConfig,
        mesh: Mesh,
        kind: LayerKind,
        index: int,
        layers: range,
    ) -> None:
        chunks = config.virtual_pipeline_model_parallel_size or 1
        dense, norm = layer_spec(kind, family.qk_norm)
        experts = family.experts(hf)
        sparse = dense if experts is None else layer_spec(kind, family.qk_norm, experts=True)[0]
        with_experts = () if experts is None else experts.layers
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[sparse if layer in with_experts else dense for layer in layers], layer_norm=norm
            ),
            vocab_size=padded_vocabulary(hf["vocab_size"], mesh.tensor),
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=mesh.first_stage and index == 0,
            post_process=mesh.last_stage and index == chunks - 1,
            vp_stage=index if chunks > 1 else None,
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
            position_embedding_type="rope",
        )
        self.rotary_pos_emb = PackedRotary(rope_frequencies(hf)[0])
        self.true_vocab_size = int(hf["vocab_size"])
        self.layers = layers

    def forward(self, token_ids: Tensor, row: PackedRow) -> Tensor:
        """Map [1, T / CP] token ids to [T / CP, 1, H] hidden states (1 / TP of them under sequence parallelism)."""
        return super().forward(
            input_ids=token_ids, position_ids=row.position_ids[None], attention_mask=None, packed_seq_params=row
        )

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """Return the output weight [V / TP, H] of the last stage; the embedding if the two are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
