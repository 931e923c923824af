"""Where the gradient of the output weight is summed: Megatron's main_grad, or a buffer that autograd then gets.

Megatron's DistributedDataParallel gives each parameter ``main_grad``, an fp32 view of the buffer that it reduces. When
autograd accumulates the parameter's gradient, a hook adds ``param.grad`` to it, unless
``param.grad_added_to_main_grad``, and counts the parameter as ready; the buffer's reduction starts when all are. So
whoever writes main_grad directly must still hand autograd *some* gradient, for the hook to run.

Only attributes are looked at; megatron is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WeightGradient:
    """fp32 sum of one weight's gradient.

    A weight that autograd reaches by another path in the same backward pass (the embedding that is tied to it, on the
    same pipeline stage) must carry Megatron's ``zero_out_wgrad``: then the other path's gradient still counts.
    """

    def __init__(self, weight: Tensor) -> None:
        main_grad = getattr(weight, "main_grad", None)
        self.in_main_grad = main_grad is not None and main_grad.dtype == torch.float32
        """Whether what is added here is final: it cannot be scaled later."""
        self._weight: Any = weight
        self.sum: Tensor = (
            main_grad  # type: ignore[assignment]
            if self.in_main_grad
            else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        )
        """[V/tp, H]; the caller adds to it."""

    def for_autograd(self) -> Tensor | None:
        """What ``backward`` returns for the weight."""
        if not self.in_main_grad:
            return self.sum.to(self._weight.dtype)
        if getattr(self._weight, "zero_out_wgrad", False):
            # The other path's gradient arrives at the hook alone, which adds it.
            return None
        if hasattr(self._weight, "grad_added_to_main_grad"):
            self._weight.grad_added_to_main_grad = True
        # Its values are never read: the head of main_grad's own memory, seen as the weight's dtype, saves a buffer.
        shape = self._weight.shape
        return self.sum.detach().view(-1).view(self._weight.dtype)[: shape.numel()].view(shape)
