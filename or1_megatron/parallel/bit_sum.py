"""Sums a tensor's bits; one flipped bit changes the sum."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE_BYTES = 16 << 20


def bit_sum(data: Tensor) -> Tensor:
    """Return the sum, modulo 2**64, of a contiguous tensor's memory read as 64-bit integers, an int64 scalar on its
    device. Any single flipped bit changes it.

    Where size or place do not divide, it is read as bytes. torch copies these to int64 before it adds them, so they go
    piece by piece.
    """
    size, place = data.nbytes, data.storage_offset() * data.element_size()
    if size % 8 == place % 8 == 0:
        return data.view(-1).view(torch.int64).sum()
    pieces = data.view(-1).view(torch.uint8).split(_PIECE_BYTES)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()
