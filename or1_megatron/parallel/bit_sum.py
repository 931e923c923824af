"""Sums a tensor's bits; one flipped bit changes the sum."""

from __future__ import annotations

import torch
from torch import Tensor


def bit_sum(data: Tensor) -> Tensor:
    """Return the sum of a contiguous tensor's memory read as 32-bit integers (16- or 8-bit where it does not divide),
    an int64 scalar on its device. Any single flipped bit changes it; it does not overflow below 2**32 elements."""
    size = data.numel() * data.element_size()
    words = torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.int8
    return data.view(-1).view(words).sum(dtype=torch.int64)
