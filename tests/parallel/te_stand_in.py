"""A stand-in for the package ``transformer_engine`` on CPU, with which Megatron's own wrappers of it can be run.

Names of parameters and state, their shapes and attributes, and when a gradient is added to ``main_grad`` are those of
Transformer Engine 2.17.1 (transformer_engine/pytorch: module/linear.py, module/layernorm_linear.py, module/rmsnorm.py,
module/base.py, attention/rope.py, attention/dot_product_attention). The arithmetic is plain torch's, so it says nothing
about the real kernels.
"""

from __future__ import annotations

import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

VERSION = "2.17.1"


class _Product(torch.autograd.Function):
    """The product x w^T. With ``fused`` the weight's gradient is added to main_grad, and autograd gets NaN instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool, is_first: bool | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused, ctx.is_first = weight, fused, is_first
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = g.flatten(0, -2).t() @ x.flatten(0, -2)
        if not ctx.fused:
            return g @ weight, of_weight, None, None
        parameter = ctx.weight
        if ctx.is_first:  # the first micro-batch overwrites
            parameter.main_grad.copy_(of_weight)
        else:
            parameter.main_grad.add_(of_weight)
        parameter.grad_added_to_main_grad = True
        dummy = 0.0 if getattr(parameter, "zero_out_wgrad", False) else float("nan")
        return g @ weight, torch.full_like(weight, dummy), None, None


class Linear(torch.nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        **others: Any,
    ) -> None:
        super().__init__()
        assert parallel_mode in ("column", "row", None)
        self.tp_group, self.tp_size = tp_group, 1 if tp_group is None else tp_group.size()
        self.parallel_mode, self.fuse_wgrad_accumulation = parallel_mode, fuse_wgrad_accumulation
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.use_bias, self.return_bias = bias, return_bias
        made = {"device": device, "dtype": params_dtype}
        self._before_weight(in_features, made)
        self.weight = torch.nn.Parameter(torch.full((self.out_features, self.in_features), float("nan"), **made))
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **made)) if bias else torch.empty(0, **made)

    def _before_weight(self, in_features: int, made: Any) -> None: ...

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        from megatron.core.tensor_parallel import mappings

        column, row = (self.tp_size > 1 and self.parallel_mode == mode for mode in ("column", "row"))
        if column and self.sequence_parallel:
            inp = mappings.gather_from_sequence_parallel_region(inp, group=self.tp_group)
        elif column:
            inp = mappings.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)
        out = _Product.apply(inp, self.weight, self.fuse_wgrad_accumulation, is_first_microbatch)
        if row and self.sequence_parallel:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif row:
            out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        if self.use_bias and not self.return_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


def _normed(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + zero_centred)).to(x.dtype)


class LayerNormLinear(Linear):
    def __init__(
        self, *features: int, eps: float = 1e-5, normalization: str, zero_centered_gamma: bool = False, **of_linear: Any
    ) -> None:
        assert normalization == "RMSNorm"
        assert not of_linear.pop("return_layernorm_output", False)
        super().__init__(*features, **of_linear)
        self.eps, self.zero_centred = eps, zero_centered_gamma

    def _before_weight(self, in_features: int, made: Any) -> None:
        self.layer_norm_weight = torch.nn.Parameter(torch.full((in_features,), float("nan"), **made))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias = None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_grad: bool = False) -> Any:
        return super().forward(_normed(inp, self.layer_norm_weight, self.eps, self.zero_centred), is_first_microbatch)


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        assert (normalized_shape is None) != (hidden_size is None)
        size = normalized_shape or hidden_size
        self.eps, self.zero_centred = eps, zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.full((size,), float("nan"), device=device, dtype=params_dtype))  # type: ignore[arg-type]
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor) -> Tensor:
        return _normed(inp, self.weight, self.eps, self.zero_centred)


class DotProductAttention(torch.nn.Module):
    """Causal attention inside the sequences of ``thd``; without context parallelism."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        assert arguments.get("cp_group") is None
        self.scale = arguments.get("softmax_scale")

    def forward(
        self,
        query_layer: Tensor,  # [T, N, D]
        key_layer: Tensor,  # [T, G, D]
        value_layer: Tensor,
        attention_mask: Any = None,
        *,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        attn_mask_type: str,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        assert not pad_between_seqs
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal") and query_layer.dim() == 3
        bounds, outputs = cu_seqlens_q.tolist(), []
        assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(bounds))
        for a, b in itertools.pairwise(bounds):
            q, k, v = (x[a:b].transpose(0, 1)[None] for x in (query_layer, key_layer, value_layer))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def apply_rotary_pos_emb(
    t: Tensor,  # [T, 1, N, D]
    freqs: Tensor,  # [T, 1, 1, R]
    tensor_format: str = "sbhd",
    start_positions: Any = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate each pair (x[i], x[i + R/2]) by its angle, as complex numbers in fp32; the other D - R channels stay."""
    assert fused and (tensor_format, interleaved, cu_seqlens, cp_size) == ("sbhd", False, None, 1)
    assert freqs.shape[:3] == (t.shape[0], 1, 1) and freqs.dtype == torch.float32
    half = freqs.shape[-1] // 2
    turned = torch.complex(t[..., :half].float(), t[..., half : 2 * half].float()) * torch.exp(1j * freqs[..., :half])
    return torch.cat((turned.real.to(t.dtype), turned.imag.to(t.dtype), t[..., 2 * half :]), dim=-1)


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    return torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype)


def install() -> None:
    """Make ``import transformer_engine`` find the stand-in. Call it before Megatron is imported."""
    assert "megatron" not in sys.modules
    absent = type("Absent", (torch.nn.Module,), {})
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        "common": {},
        "common.recipe": {"DelayedScaling": absent},
        "pytorch": {
            "Linear": Linear,
            "LayerNormLinear": LayerNormLinear,
            "RMSNorm": RMSNorm,
            "LayerNorm": absent,
            "DotProductAttention": DotProductAttention,
            "GroupedLinear": absent,
            "ops": SimpleNamespace(Sequential=absent, FusibleOperation=absent),
        },
        "pytorch.fp8": {"FP8GlobalStateManager": absent, "fp8_autocast": None, "fp8_model_init": None},
        "pytorch.distributed": {"CudaRNGStatesTracker": absent, "activation_recompute_forward": None},
        "pytorch.router": dict.fromkeys(
            ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
        ),
        "pytorch.tensor": {"QuantizedTensor": absent},
        "pytorch.module": {},
        "pytorch.module.base": {"get_dummy_wgrad": get_dummy_wgrad, "TransformerEngineBaseModule": Linear},
        "pytorch.attention": {},
        "pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    }
    for path, content in modules.items():
        name = ".".join(filter(None, ("transformer_engine", path)))
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
