"""The policy network: an HF config becomes Megatron's GPTModel, one pipeline stage of it on each rank.

Shapes: T packed tokens, H hidden size, V padded vocabulary; with sequence parallelism T is cut by TP between layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from or1_megatron.config import ParallelConfig
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.packed import PackedCausalAttention, PackedRotary, PackedRow
from or1_megatron.weights.table import ModelFamily

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight, statistics in fp32 (arXiv 1910.07467), rounded as the HF models do it.

    Its weight says when it lives on a sequence-parallel shard, so that Megatron sums its gradient over TP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:  # [..., H]
        if x.dtype == torch.float32:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed = torch.nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


def layer_spec(qk_norm: bool) -> ModuleSpec:
    """One decoder layer from Megatron's own linears with our norm and packed attention; needs neither TE nor apex."""
    head_norm: type = RMSNorm if qk_norm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PackedCausalAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def transformer_config(
    hf: Mapping[str, Any], family: ModelFamily, parallel: ParallelConfig, dtype: str
) -> TransformerConfig:
    """Megatron's description of the model that ``hf`` (an HF config.json) describes."""
    params_dtype = TORCH_DTYPE[dtype]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"],
            kv_channels=family.head_dim(hf),
            normalization="RMSNorm",
            layernorm_epsilon=hf["rms_norm_eps"],
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=family.qkv_bias(hf),
            qk_layernorm=family.qk_norm,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            sequence_parallel=parallel.sequence,
            params_dtype=params_dtype,
            pipeline_dtype=params_dtype,
            bf16=params_dtype is torch.bfloat16,
            use_cpu_initialization=not torch.cuda.is_available(),
            perform_initialization=False,
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            batch_p2p_comm=False,
            deallocate_pipeline_outputs=False,
        )


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Vocabulary rows after padding, so that every TP rank holds the same number."""
    return -(-vocab_size // tensor) * tensor


class PolicyModel(GPTModel):
    """A GPTModel stage that ends in hidden states; logits are the head's business (``kernels``), tile by tile."""

    def __init__(self, hf: Mapping[str, Any], family: ModelFamily, config: TransformerConfig, mesh: Mesh) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer_spec(family.qk_norm)] * (config.num_layers // mesh.pipeline), layer_norm=RMSNorm
            ),
            vocab_size=padded_vocabulary(hf["vocab_size"], mesh.tensor),
            max_sequence_length=hf["max_position_embeddings"],
            pre_process=mesh.first_stage,
            post_process=mesh.last_stage,
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
            position_embedding_type="rope",
            rotary_base=family.rope_base(hf),
        )
        self.rotary_pos_emb = PackedRotary(family.head_dim(hf), family.rope_base(hf))
        self.true_vocab_size = int(hf["vocab_size"])

    def forward(self, token_ids: Tensor, row: PackedRow) -> Tensor:
        """[1, T] token ids to [T, 1, H] hidden states (T / TP of them under sequence parallelism)."""
        return super().forward(
            input_ids=token_ids, position_ids=row.position_ids[None], attention_mask=None, packed_seq_params=row
        )

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """[V / TP, H]: the output weight on the last stage, the embedding where the two are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
