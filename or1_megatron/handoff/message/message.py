"""A shipment as bytes: its slices, then one checksum for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from or1_megatron.handoff.errors import SliceMismatch
from or1_megatron.handoff.message.buckets import Bucket, Slice, Slot
from or1_megatron.handoff.message.checksum import Checksums, Content, checksum

Hop = tuple[int, int]
"""(from, to)"""
Group = tuple[int, ...]
"""Engine ranks, numbered after the trainer's."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """One message: what a trainer rank packs for a group of engine ranks, and its way to them."""

    number: int
    """Its place in the order of all."""
    round: int
    source: int
    destinations: Group
    hops: tuple[Hop, ...]
    """(from, to), each behind the one by which the message has come."""
    bucket: Bucket[Slice]

    def parent(self, rank: int) -> int | None:
        """From whom ``rank`` receives it."""
        return next((sender for sender, receiver in self.hops if receiver == rank), None)

    def children(self, rank: int) -> tuple[int, ...]:
        """To whom ``rank`` sends it."""
        return tuple(receiver for sender, receiver in self.hops if sender == rank)


@dataclass(slots=True)
class ReceivedSlice:
    """A slice that has arrived, as long as its message's memory is not used again."""

    slot: Slot[Slice]
    message: Tensor
    """[bytes] uint8."""
    content: Content | None
    """The message's memory, if that is the host's."""
    checksum: int
    """That came with it."""
    source: int
    """The trainer rank that has packed it."""
    handoff: int
    found: int | None = None
    """The checksum that it has, where that has been worked out."""

    @property
    def cut(self) -> Slice:
        return self.slot.spec

    @property
    def flat(self) -> Tensor:
        """[elements] of the slice's dtype: a view into the message."""
        return self.slot.flat(self.message).view(self.slot.spec.dtype)

    @property
    def values(self) -> Tensor:
        """Of the slice's shape: a view into the message."""
        return self.flat.view(self.slot.shape)

    def verify(self) -> None:
        """Raises SliceMismatch if it is not what was sent. Reads it: best called where it is read anyway."""
        if self.found is None:
            slot = self.slot
            flat = slot.flat(self.message) if self.content is None else self.content[slot.offset_bytes : slot.end_bytes]
            self.found = checksum(slot.spec, flat, self.handoff)
        if self.found != self.checksum:
            raise SliceMismatch(
                f"{self.cut} from trainer rank {self.source} did not arrive as it was sent in handoff {self.handoff}: "
                f"checksum {self.found:016x}, sent as {self.checksum:016x}"
            )


def payload_bytes(shipment: Shipment) -> int:
    return -(-shipment.bucket.size_bytes // 8) * 8


def message_bytes(shipment: Shipment) -> int:
    """On the wire."""
    return payload_bytes(shipment) + 8 * len(shipment.bucket.slots)


def pack(shipment: Shipment, message: Tensor, read: Callable[[Slice], Tensor], handoff: int) -> int:
    """Fill ``message`` [bytes] uint8 with the slices that ``read`` gives, and their checksums behind them.

    Returns the sum of the checksums. Each is taken right after its slice's copy, from the processor's cache.
    """
    slots = shipment.bucket.slots
    sums = Checksums([slot.spec for slot in slots], handoff, message.device)
    content = message.numpy() if message.device.type == "cpu" else None
    with torch._C.DisableTorchFunction():  # the policy's stand-ins for a device: several calls a slice, none needs them
        for index, slot in enumerate(slots):
            slot.view(message).copy_(read(slot.spec))
            sums.add(index, slot.flat(message) if content is None else content[slot.offset_bytes : slot.end_bytes])
    values = sums.values()
    signed = [value - (1 << 64) if value >= 1 << 63 else value for value in values]
    message[payload_bytes(shipment) :].view(torch.int64).copy_(torch.tensor(signed, dtype=torch.int64))
    return sum(values)


def unpack(shipment: Shipment, message: Tensor, handoff: int) -> list[ReceivedSlice]:
    """The slices of a message [bytes] uint8, in its order, each compared with its checksum.

    Raises:
        SliceMismatch: a slice does not have the checksum that came with it; names it.
    """
    found = unverified(shipment, message, handoff)
    for each in found:
        each.verify()
    return found


def unverified(shipment: Shipment, message: Tensor, handoff: int) -> list[ReceivedSlice]:
    """As ``unpack``, for who calls ``verify`` on each; on a GPU they are compared here, with one wait for all."""
    slots = shipment.bucket.slots
    came = [signed % (1 << 64) for signed in message[payload_bytes(shipment) :].view(torch.int64).tolist()]
    content = message.numpy() if message.device.type == "cpu" else None
    arrived = [
        ReceivedSlice(slot, message, content, expected, shipment.source, handoff)
        for slot, expected in zip(slots, came, strict=True)
    ]
    if content is None:
        sums = Checksums([slot.spec for slot in slots], handoff, message.device)
        for index, slot in enumerate(slots):
            sums.add(index, slot.flat(message))
        for each, found in zip(arrived, sums.values(), strict=True):
            each.found = found
            each.verify()
    return arrived
