"""The covariance of log-prob and advantage, token by token: it drives entropy down (arXiv 2505.22617, eq. 9 and 10)."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def covariances(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return (log pi_t - mean log pi) (A_t - mean A) of each of N tokens; the means are over all of them. [N].

    Worked example: log pi (-1, -3), A (2, 0): means -2 and 1, so (1 * 1, -1 * -1) = (1, 1).
    """
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def shuffled(count: int, seed: int, *labels: Tensor) -> Tensor:
    """Return a random order [count] of tokens that depends on what they are, not on where they lie.

    Each token gets a number that is hashed from the bits of its ``labels`` [count] fp32 and the seed, and is sorted by
    it. So the same tokens are chosen whatever the order of the samples; tokens with the same labels keep their order.
    """
    mixed = torch.full((count,), seed * 2 + 1, dtype=torch.int64, device=labels[0].device)
    for label in labels:
        mixed = _mix(mixed ^ label.float().contiguous().view(torch.int32).long())
    return mixed.sort(stable=True).indices


def _mix(values: Tensor) -> Tensor:
    """Mix the bits of int64 values, by the multipliers of the finaliser of splitmix64 (Steele et al. 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values ^ ((values >> 31) & ((1 << 33) - 1))
