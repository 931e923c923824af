"""Packs and unpacks a message of a weight handoff: tensor slices, then one checksum per slice, checked on arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from or1_megatron.handoff.failures import SliceMismatch
from or1_megatron.handoff.message.checksum import checksum, checksums, word_sum
from or1_megatron.handoff.message.slices import Slice, Slot

Group = tuple[int, ...]
"""Engine ranks that get the same messages. Engine ranks are numbered after the trainer ranks."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """One message of a plan, which the trainer rank ``source`` packs for a group of engine ranks."""

    number: int
    """The message's position among all messages of the plan."""
    round: int
    source: int
    via: int
    """The trainer rank that sends to the destinations: the source or, in two hops, the engine rank's neighbour."""
    destinations: Group
    slots: tuple[Slot, ...]

    @property
    def payload_bytes(self) -> int:
        return -(-self.slots[-1].end_bytes // 8) * 8

    @property
    def size_bytes(self) -> int:
        """Return the bytes of payload and checksums."""
        return self.payload_bytes + 8 * len(self.slots)

    @property
    def slices(self) -> list[Slice]:
        return [slot.slice for slot in self.slots]

    def parent(self, rank: int) -> int | None:
        """Return the rank from which ``rank`` receives the message; None if ``rank`` does not receive it."""
        if rank in self.destinations:
            return self.via
        return self.source if rank == self.via != self.source else None

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks to which ``rank`` sends the message."""
        if rank == self.via:
            return self.destinations
        return (self.via,) if rank == self.source else ()


@dataclass(slots=True)
class ReceivedSlice:
    """A slice that has arrived. Its values are in the message until ``keep`` copies them."""

    slot: Slot
    message: Tensor
    """The message that holds the slice, [bytes] uint8; after ``keep``, the slice's own copy."""
    checksum: int
    """The checksum that came with the slice."""
    source: int
    """The trainer rank that has packed the slice."""
    handoff: int
    computed: int | None = None
    """The checksum of the received bytes, once computed."""
    kept: bool = False

    @property
    def slice(self) -> Slice:
        return self.slot.slice

    @property
    def flat(self) -> Tensor:
        """Return the slice as a flat view into the message: [elements] of the slice's dtype."""
        return self.slot.flat(self.message).view(self.slice.dtype)

    @property
    def values(self) -> Tensor:
        """Return the slice as a view into the message, in the slice's shape."""
        return self.flat.view(self.slice.shape)

    def verify(self) -> None:
        """Raise SliceMismatch if the slice is not what was sent. Call this just before the slice is read."""
        if self.computed is None:
            self.computed = checksum(self.slice, self.slot.flat(self.message), self.handoff)
        if self.computed != self.checksum:
            raise SliceMismatch(
                f"{self.slice} from trainer rank {self.source} did not arrive as it was sent in handoff "
                f"{self.handoff}: checksum {self.computed:016x}, sent as {self.checksum:016x}"
            )

    def keep(self) -> None:
        """Verify the slice and copy it out of its message, whose memory will be reused."""
        if not self.kept:
            self.verify()
            self.message = self.slot.flat(self.message).clone()
            self.slot = replace(self.slot, offset_bytes=0, end_bytes=self.message.numel())
            self.kept = True


def pack(shipment: Shipment, message: Tensor, read: Callable[[Slice], Tensor], handoff: int) -> int:
    """Fill ``message`` [bytes] uint8 with the slices that ``read`` returns, followed by their checksums.

    Returns the sum of the checksums. A checksum is computed right after its slice is copied, while the cache has it.
    """
    sums = []
    with torch._C.DisableTorchFunction():  # the CPU device layer intercepts torch functions, which costs time here
        for slot in shipment.slots:
            slot.view(message).copy_(read(slot.slice))
            sums.append(word_sum(slot.flat(message)))
    values = checksums(shipment.slices, sums, handoff)
    signed = [value - (1 << 64) if value >= 1 << 63 else value for value in values]
    message[shipment.payload_bytes :].view(torch.int64).copy_(torch.tensor(signed, dtype=torch.int64))
    return sum(values)


def unpack(shipment: Shipment, message: Tensor, handoff: int) -> list[ReceivedSlice]:
    """Return the slices of a message [bytes] uint8, in order.

    On CPU the caller verifies each slice when reading it. On a GPU all slices are verified here, with one wait.

    Raises:
        SliceMismatch: on a GPU, a slice does not match the checksum sent with it. The message names the slice.
    """
    came = [signed % (1 << 64) for signed in message[shipment.payload_bytes :].view(torch.int64).tolist()]
    received = [
        ReceivedSlice(slot, message, sent, shipment.source, handoff)
        for slot, sent in zip(shipment.slots, came, strict=True)
    ]
    if message.device.type != "cpu":
        computed = checksums(shipment.slices, [word_sum(slot.flat(message)) for slot in shipment.slots], handoff)
        for part, value in zip(received, computed, strict=True):
            part.computed = value
            part.verify()
    return received
