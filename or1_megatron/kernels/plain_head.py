"""Log-probs and entropies by plain autograd on all logits, with which tests compare the fused head."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_log_probs_and_entropies(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropies) [T] from hidden [T, H] and weight [V, H], in the inputs' dtype."""
    log_p = torch.log_softmax(torch.matmul(hidden, weight.t()) / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)
