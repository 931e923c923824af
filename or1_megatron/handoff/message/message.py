"""A message: slices of tensors, followed by one checksum for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from or1_megatron.handoff.errors import SliceMismatch
from or1_megatron.handoff.message.buckets import Slice, Slot
from or1_megatron.handoff.message.checksum import Checksums, Content, checksum

Hop = tuple[int, int]
"""(from, to)"""
Group = tuple[int, ...]
"""Engine ranks, numbered after the trainer's."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """One message of a plan: what a trainer rank packs for a group of engine ranks, and the hops to them."""

    number: int
    """Its place in the order of all."""
    round: int
    source: int
    destinations: Group
    hops: tuple[Hop, ...]
    """Each comes after the hop by which the message reaches its sender."""
    slots: tuple[Slot, ...]

    @property
    def payload_bytes(self) -> int:
        return -(-self.slots[-1].end_bytes // 8) * 8

    @property
    def size_bytes(self) -> int:
        """Payload and checksums."""
        return self.payload_bytes + 8 * len(self.slots)

    def parent(self, rank: int) -> int | None:
        """Return the rank from which ``rank`` receives it."""
        return next((sender for sender, receiver in self.hops if receiver == rank), None)

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks to which ``rank`` sends it."""
        return tuple(receiver for sender, receiver in self.hops if sender == rank)


@dataclass(slots=True)
class ReceivedSlice:
    """A slice that has arrived; a view into its message until ``keep`` is called."""

    slot: Slot
    message: Tensor
    """[bytes] uint8."""
    content: Content | None
    """The message's memory, if that is the host's."""
    checksum: int
    """The one that came with it."""
    source: int
    """The trainer rank that has packed it."""
    handoff: int
    found: int | None = None
    """The checksum of what came, once it is computed."""
    kept: bool = False

    @property
    def slice(self) -> Slice:
        return self.slot.slice

    @property
    def flat(self) -> Tensor:
        """[elements] of the slice's dtype: a view into the message."""
        return self.slot.flat(self.message).view(self.slice.dtype)

    @property
    def values(self) -> Tensor:
        """In the slice's shape: a view into the message."""
        return self.flat.view(self.slot.shape)

    def verify(self) -> None:
        """Raise SliceMismatch if it is not what was sent. Reads it: best called where it is read anyway."""
        if self.found is None:
            slot = self.slot
            flat = slot.flat(self.message) if self.content is None else self.content[slot.offset_bytes : slot.end_bytes]
            self.found = checksum(slot.slice, flat, self.handoff)
        if self.found != self.checksum:
            raise SliceMismatch(
                f"{self.slice} from trainer rank {self.source} did not arrive as it was sent in handoff "
                f"{self.handoff}: checksum {self.found:016x}, sent as {self.checksum:016x}"
            )

    def keep(self) -> None:
        """Copy it, verified, out of its message, whose memory is about to be used again."""
        if not self.kept:
            self.verify()
            self.message = self.slot.flat(self.message).clone()
            self.slot = replace(self.slot, offset_bytes=0, end_bytes=self.message.numel())
            self.kept = True


def pack(shipment: Shipment, message: Tensor, read: Callable[[Slice], Tensor], handoff: int) -> int:
    """Fill ``message`` [bytes] uint8 with the slices that ``read`` gives, followed by their checksums.

    Returns the sum of the checksums. Each is computed right after its slice is copied, from the processor's cache.
    """
    sums = Checksums([slot.slice for slot in shipment.slots], handoff, message.device)
    content = message.numpy() if message.device.type == "cpu" else None
    with torch._C.DisableTorchFunction():  # the CPU device layer intercepts torch functions, which costs time here
        for index, slot in enumerate(shipment.slots):
            slot.view(message).copy_(read(slot.slice))
            sums.add(index, slot.flat(message) if content is None else content[slot.offset_bytes : slot.end_bytes])
    values = sums.values()
    signed = [value - (1 << 64) if value >= 1 << 63 else value for value in values]
    message[shipment.payload_bytes :].view(torch.int64).copy_(torch.tensor(signed, dtype=torch.int64))
    return sum(values)


def unpack(shipment: Shipment, message: Tensor, handoff: int) -> list[ReceivedSlice]:
    """Return the slices of a message [bytes] uint8, in its order; the caller verifies each when it reads it.

    On a GPU they are verified here, with one wait for all.

    Raises:
        SliceMismatch: on a GPU, a slice does not have the checksum that came with it; names it.
    """
    came = [signed % (1 << 64) for signed in message[shipment.payload_bytes :].view(torch.int64).tolist()]
    content = message.numpy() if message.device.type == "cpu" else None
    arrived = [
        ReceivedSlice(slot, message, content, expected, shipment.source, handoff)
        for slot, expected in zip(shipment.slots, came, strict=True)
    ]
    if content is None:
        sums = Checksums([slot.slice for slot in shipment.slots], handoff, message.device)
        for index, slot in enumerate(shipment.slots):
            sums.add(index, slot.flat(message))
        for each, found in zip(arrived, sums.values(), strict=True):
            each.found = found
            each.verify()
    return arrived
