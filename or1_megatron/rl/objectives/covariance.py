"""The covariance of log-prob and advantage, token by token: it drives entropy down (arXiv 2505.22617, eq. 9 and 10)."""

from __future__ import annotations

import torch
from torch import Tensor

from or1_megatron.interfaces import Sequences


@torch.no_grad()
def covariances(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return (log pi_t - mean log pi) (A_t - mean A) of each of N tokens; the means are over all of them. [N].

    Worked example: log pi (-1, -3), A (2, 0): means -2 and 1, so (1 * 1, -1 * -1) = (1, 1).
    """
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def shuffled(seed: int, sequences: Sequences, *labels: Tensor) -> Tensor:
    """Return a random order [N] of tokens, which are sequence after sequence, each in order.

    A token's number is hashed from the seed, its place in its sequence, and the bits of all of the sequence's
    ``labels`` [N] fp32, and tokens are sorted by it. So tokens with the same labels (log-probs of 0) are drawn alike,
    and the same tokens are drawn whatever the order of the samples.
    """
    device, starts = sequences.index.device, sequences.lengths.cumsum(0) - sequences.lengths
    offsets = torch.arange(len(sequences.index), device=device) - starts[sequences.index]
    mixed = _mix(offsets + (seed * 2 + 1 << 32))
    for label in labels:
        mixed = _mix(mixed ^ label.float().contiguous().view(torch.int32).long())
    none = torch.zeros(len(sequences.lengths), dtype=torch.int64, device=device)
    of_sequences = none.index_add(0, sequences.index, mixed)
    return _mix(mixed ^ _mix(of_sequences)[sequences.index]).sort(stable=True).indices


def _mix(values: Tensor) -> Tensor:
    """Mix the bits of int64 values, by the multipliers of the finaliser of splitmix64 (Steele et al. 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values ^ ((values >> 31) & ((1 << 33) - 1))
