"""Gradient accumulation fusion in Megatron without APEX: a weight gradient's GEMM adds directly to ``main_grad``.

Without fusion, the gradient of every micro-batch is rounded to the weights' dtype, written, read and then added in
fp32. Megatron calls APEX's extension ``fused_weight_gradient_mlp_cuda`` for the fused product. This module replaces
the extension by torch's addmm, which also runs on the CPU. Transformer Engine's linears have a fused product already.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron.core.tensor_parallel import layers
from torch import Tensor

from or1_megatron.kernels.head_weight_gradient import add_product


def add_weight_gradient(inputs: Tensor, grad_outputs: Tensor, main_grad: Tensor) -> None:
    """Add a linear's weight gradient, grad_outputs [T, out].t() @ inputs [T, in], to the fp32 main_grad [out, in]."""
    if inputs.device.type == "cpu":
        inputs, grad_outputs = inputs.float(), grad_outputs.float()
    add_product(main_grad, grad_outputs.t(), inputs)


def use_own_weight_gradient() -> None:
    """Make Megatron's linears call ``add_weight_gradient`` where ``gradient_accumulation_fusion`` is set."""
    module: Any = layers
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_gradient)
    module._grad_accum_fusion_available = True
