"""The modules of one decoder layer: Megatron's own linears with our norm and attention, or Transformer Engine's.

Tensor parallelism cuts the parameters of both kinds alike. A linear of Transformer Engine contains its input's norm.
``weights.decoder.unfused_name`` gives this norm the name of a separate norm, so both kinds load the same checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from or1_megatron.parallel.delta_net import PackedDeltaNet
from or1_megatron.parallel.experts import GroupedExperts
from or1_megatron.parallel.latent_attention import LatentAttention
from or1_megatron.parallel.packed import PackedCausalAttention, PackedRow
from or1_megatron.parallel.sink_attention import SinkAttention
from or1_megatron.sizing.parallel_layouts import LayerKind


class RMSNorm(torch.nn.Module):
    """Computes x / rms(x) * weight with statistics in fp32 (arXiv 1910.07467), and rounds as the HF models do.

    Zero-centred norms multiply by 1 + weight, before they round. Under sequence parallelism the weight is marked, so
    that Megatron sums the weight's gradient over TP.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:  # [..., H]
        if self.zero_centred:
            return torch.nn.functional.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(
                x.dtype
            )
        if x.dtype == torch.float32:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed = torch.nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


def decoder_spec(kind: LayerKind, config: TransformerConfig) -> ModuleSpec:
    """Return the decoder's spec: a module for each symbol of ``model.LAYER_SYMBOL``, and no final norm.

    ``config`` says whether queries and keys are normed, and whether attention uses latents.
    """
    layer = _transformer_engine_layer if kind == "transformer_engine" else _own_layer
    layers = HybridStackSubmodules(
        attention_layer=layer(config, experts=False, linear=False),
        moe_layer=layer(config, experts=True, linear=False),
        gdn_layer=layer(config, experts=False, linear=True),
        mlp_layer=layer(config, experts=True, linear=True),
    )
    # HybridStack's own final norm is always Transformer Engine's.
    return ModuleSpec(module=HybridStack, params={"post_layer_norm": False}, submodules=layers)


def final_norm(kind: LayerKind) -> Any:
    """Return the class of the norm after the last layer."""
    if kind == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def _transformer_engine_layer(config: TransformerConfig, experts: bool, linear: bool) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )

    # A norm and the linear after it in one module. A router needs the norm's output, so experts have a separate norm,
    # and so have linear attention and latent attention, where two linears follow.
    fused, column, row = TELayerNormColumnParallelLinear, TEColumnParallelLinear, TERowParallelLinear
    separate = linear or config.multi_latent_attention
    return _spec(
        _linear_attention(column, row)
        if linear
        else _attention(config, column if separate else fused, row, _transformer_engine_attention(), TENorm),
        _mlp(column if experts else fused, row, experts),
        input_norm=TENorm if separate else IdentityOp,
        mlp_norm=TENorm if experts else IdentityOp,
    )


def _own_layer(config: TransformerConfig, experts: bool, linear: bool) -> ModuleSpec:
    column, row = ColumnParallelLinear, RowParallelLinear
    return _spec(
        _linear_attention(column, row) if linear else _attention(config, column, row, PackedCausalAttention, RMSNorm),
        _mlp(column, row, experts),
        input_norm=RMSNorm,
        mlp_norm=RMSNorm,
    )


def _attention(config: TransformerConfig, column: Any, row: Any, core: Any, norm: Any) -> ModuleSpec:
    core = SinkAttention if config.softmax_type == "learnable" else core
    if isinstance(config, MLATransformerConfig):
        linears = {f"linear_{name}_proj": column for name in ("q", "q_down", "q_up", "kv_down", "kv_up")}
        submodules: Any = MLASelfAttentionSubmodules(
            **linears,
            core_attention=core,
            linear_proj=row,
            q_layernorm=IdentityOp if config.q_lora_rank is None else norm,
            kv_layernorm=norm,
        )
    else:
        head_norm = norm if config.qk_layernorm else IdentityOp
        submodules = SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=core,
            linear_proj=row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        )
    module = LatentAttention if config.multi_latent_attention else SelfAttention
    return ModuleSpec(module=module, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _mlp(column: Any, row: Any, experts: bool) -> Any:
    linears = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    if not experts:
        return partial(MLP.as_mlp_submodule, submodules=linears)
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=partial(GroupedExperts, submodules=linears),
            shared_experts=partial(SharedExpertMLP, submodules=linears),
        ),
    )


def _linear_attention(column: Any, row: Any) -> ModuleSpec:
    return ModuleSpec(module=PackedDeltaNet, params={"column": column, "row": row})


def _spec(attention: ModuleSpec, mlp: Any, *, input_norm: Any, mlp_norm: Any) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=mlp_norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _transformer_engine_attention() -> type:
    """Return a class that calls Transformer Engine's attention, which takes [T, heads, D] and the sequences' bounds.

    Rotary angles are already applied per token, and context parallelism cuts sequences as ``context_parallel.py`` does.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PackedTEAttention(TEDotProductAttention):
        def forward(
            self,
            query: Tensor,  # [T / CP, 1, N, D]
            key: Tensor,  # [T / CP, 1, G, D]
            value: Tensor,  # [T / CP, 1, G, D]
            attention_mask: Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: PackedRow | None = None,
        ) -> Tensor:  # [T / CP, 1, N * D]
            assert packed_seq_params is not None, "PackedTEAttention needs packed_seq_params"
            row = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=packed_seq_params.cu_seqlens_q,
                cu_seqlens_kv=packed_seq_params.cu_seqlens_kv,
                max_seqlen_q=packed_seq_params.max_seqlen_q,
                max_seqlen_kv=packed_seq_params.max_seqlen_kv,
            )
            parts = (x.squeeze(1).contiguous() for x in (query, key, value))
            out: Tensor = super().forward(*parts, attention_mask, attn_mask_type=attn_mask_type, packed_seq_params=row)
            return out.reshape(query.shape[0], 1, -1)

    return PackedTEAttention
