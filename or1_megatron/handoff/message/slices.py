"""Slices of HF tensors (``Slice``), and their positions in messages of bounded size (``Slot``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from or1_megatron.weights.holdings import Box, box_shape, box_size, whole

ALIGNMENT_BYTES = 16  # a view of a byte buffer as a wider dtype must start at a multiple of the element size


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle ``box`` of the HF tensor ``name``, which an engine rank wants or a message holds."""

    name: str
    box: Box
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)

    @property
    def size_bytes(self) -> int:
        return box_size(self.box) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"'{self.name}'[{', '.join(f'{start}:{stop}' for start, stop in self.box)}]"


def whole_tensor(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Slice:
    """Return the slice that contains a whole tensor."""
    return Slice(name, whole(shape), dtype)


@dataclass(frozen=True, slots=True)
class Slot:
    """A slice's position in its message."""

    slice: Slice
    offset_bytes: int
    end_bytes: int

    def flat(self, message: Tensor) -> Tensor:
        """Return a view of the slice's bytes inside ``message`` [bytes] uint8."""
        return message[self.offset_bytes : self.end_bytes]

    def view(self, message: Tensor) -> Tensor:
        """Return a view of the slice inside ``message``, in the slice's dtype and shape."""
        return self.flat(message).view(self.slice.dtype).view(self.slice.shape)


def plan_buckets(slices: Sequence[Slice], bucket_bytes: int) -> list[tuple[Slot, ...]]:
    """Return the slices, in order, in buckets of at most ``bucket_bytes``. A larger slice gets a bucket of its own."""
    buckets: list[tuple[Slot, ...]] = []
    slots: list[Slot] = []
    filled = 0
    for part in slices:
        offset = -(-filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size = part.size_bytes
        if slots and offset + size > bucket_bytes:
            buckets.append(tuple(slots))
            slots, offset = [], 0
        filled = offset + size
        slots.append(Slot(part, offset, filled))
    if slots:
        buckets.append(tuple(slots))
    return buckets
