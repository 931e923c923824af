"""Sums the output weight's gradient in fp32, in Megatron's main_grad or in a buffer for autograd.

Megatron's DistributedDataParallel gives each parameter ``main_grad``, an fp32 view of the buffer that Megatron reduces.
When autograd accumulates the parameter's gradient, a hook counts the parameter as ready and, unless the parameter has
``grad_added_to_main_grad`` set, adds ``param.grad`` to ``main_grad``. The reduction starts when all parameters are
ready. Code that writes main_grad itself must therefore return *some* gradient to autograd, so that the hook runs.

This module only reads and sets these attributes; it does not import megatron.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor, *, keep: float = 1.0, factor: float = 1.0) -> None:
    """Set total = keep * total + factor * a @ b in place, in fp32. With ``keep`` 0 the old total is not read.

    On CPU ``a`` and ``b`` must be fp32, because there is no GEMM of bf16 inputs with an fp32 result.
    """
    out_dtype: Any = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    torch.addmm(total, a, b, beta=keep, alpha=factor, out=total, **out_dtype)


class WeightGradient:
    """The fp32 sum of one weight's gradient.

    If autograd also reaches the weight by another path in the same backward pass (a tied embedding on the same pipeline
    stage, for example), the weight must have Megatron's ``zero_out_wgrad``, so that both gradients are added.
    """

    def __init__(self, weight: Tensor) -> None:
        main_grad = getattr(weight, "main_grad", None)
        self.in_main_grad = main_grad is not None and main_grad.dtype == torch.float32
        """Whether the sum is in main_grad, and therefore cannot be scaled later."""
        self._weight: Any = weight
        self.sum: Tensor = (
            main_grad  # type: ignore[assignment]
            if self.in_main_grad
            else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        )
        """The sum [V/tp, H], to which the caller adds."""

    def for_autograd(self) -> Tensor | None:
        """Return what an autograd function's ``backward`` must return as the weight's gradient."""
        if not self.in_main_grad:
            return self.sum.to(self._weight.dtype)
        if getattr(self._weight, "zero_out_wgrad", False):
            # The hook gets only the other path's gradient, and adds it to main_grad.
            return None
        if hasattr(self._weight, "grad_added_to_main_grad"):
            self._weight.grad_added_to_main_grad = True
        # The values are never read. A view of main_grad's memory in the weight's dtype saves a buffer.
        shape = self._weight.shape
        return self.sum.detach().view(-1).view(self._weight.dtype)[: shape.numel()].view(shape)
