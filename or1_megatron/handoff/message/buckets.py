"""How tensors travel: packed into buckets of bounded size, by a plan that both ends compute from the metadata alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from or1_megatron.weights.holdings import Box, box_shape, box_size

ALIGNMENT_BYTES = 16  # a view of a byte buffer as a wider dtype must start at a multiple of the element size


class Spec(Protocol):
    """What has to be known of a tensor to give it a place."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size_bytes(self) -> int: ...


S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and full shape of one tensor on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of an HF tensor: what an engine rank wants of it, or what a message holds."""

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


@dataclass(frozen=True, slots=True)
class Slot(Generic[S]):
    """A tensor's place in its bucket."""

    spec: S
    offset_bytes: int
    end_bytes: int
    shape: tuple[int, ...]
    """The spec's; worked out once, as ``end_bytes`` is: both are asked for at every handoff."""

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its bytes inside ``buffer`` [bucket bytes] uint8; no copy."""
        return buffer[self.offset_bytes : self.end_bytes]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor inside ``buffer``; no copy."""
        return self.flat(buffer).view(self.spec.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket(Generic[S]):
    slots: tuple[Slot[S], ...]
    size_bytes: int


def plan_buckets(specs: Sequence[S], bucket_bytes: int) -> list[Bucket[S]]:
    """Cut the sequence of tensors, in order, into buckets of at most ``bucket_bytes``.

    A tensor larger than that gets a bucket of its own: the receiver needs it whole to load it, so cutting it would save
    nothing there.
    """
    buckets: list[Bucket[S]] = []
    slots: list[Slot[S]] = []
    filled = 0
    for spec in specs:
        offset = -(-filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size = spec.size_bytes
        if slots and offset + size > bucket_bytes:
            buckets.append(Bucket(tuple(slots), filled))
            slots, offset = [], 0
        filled = offset + size
        slots.append(Slot(spec, offset, filled, spec.shape))
    if slots:
        buckets.append(Bucket(tuple(slots), filled))
    return buckets
