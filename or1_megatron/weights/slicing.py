"""Cuts a whole Megatron tensor over tensor-parallel ranks, and joins the parts again; without communication."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor


class Cut(Enum):
    """How tensor parallelism cuts a weight."""

    WHOLE = "whole"
    """Not cut: every rank holds all of it (norms)."""
    COLUMN = "column"
    """Axis 0, equal parts (linears that split their outputs, and their biases)."""
    ROW = "row"
    """Axis 1, equal parts (linears that split their inputs)."""
    HALVES = "halves"
    """Axis 0, each half cut by itself; a rank holds a part of the first half, then a part of the second (gate/up)."""
    VOCABULARY = "vocabulary"
    """Axis 0, padded with zero rows to a multiple of the ranks (embeddings, output layer)."""


def cut(whole: Tensor, how: Cut, rank: int, size: int) -> Tensor:
    """Return the part of ``whole`` that rank ``rank`` of ``size`` tensor-parallel ranks holds.

    Raises:
        ValueError: the length of the axis that is cut is not divisible by ``size``.
    """
    if how is Cut.WHOLE or (size == 1 and how is not Cut.VOCABULARY):
        return whole
    if how is Cut.VOCABULARY:
        missing = -whole.shape[0] % size
        if missing:
            whole = torch.cat((whole, whole.new_zeros(missing, *whole.shape[1:])))
        return whole.chunk(size, dim=0)[rank]
    if how is Cut.HALVES:
        return torch.cat([cut(half, Cut.COLUMN, rank, size) for half in whole.chunk(2, dim=0)])
    axis = 1 if how is Cut.ROW else 0
    if whole.shape[axis] % size:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} cannot be cut along axis {axis} into {size} parts")
    return whole.chunk(size, dim=axis)[rank]


def join(parts: Sequence[Tensor], how: Cut) -> Tensor:
    """Join all ranks' parts: the inverse of ``cut``. Vocabulary padding stays; ``PaddedVocabulary`` drops it."""
    if how is Cut.WHOLE or len(parts) == 1:
        return parts[0]
    if how is Cut.HALVES:
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(parts), dim=1 if how is Cut.ROW else 0)
