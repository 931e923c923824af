"""A shipment as bytes: its slices, then one checksum for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from or1_megatron.handoff.buckets import Slot
from or1_megatron.handoff.checksum import Checksums, checksum
from or1_megatron.handoff.plan import Shipment, Slice


class SliceMismatch(RuntimeError):
    """A slice did not arrive as it was sent."""


class Received(NamedTuple):
    """A slice that has arrived."""

    cut: Slice
    values: Tensor
    """A view into the message."""
    checksum: int
    """That came with it."""
    verify: Callable[[], None]
    """Raises SliceMismatch if ``values`` are not what was sent. Reads them: best called where they are read anyway."""


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
    for index, slot in enumerate(slots):
        slot.view(message).copy_(read(slot.spec))
        sums.add(index, slot.flat(message))
    values = sums.values()
    signed = [value - (1 << 64) if value >= 1 << 63 else value for value in values]
    message[payload_bytes(shipment) :].view(torch.int64).copy_(torch.tensor(signed, dtype=torch.int64))
    return sum(values)


def unpack(shipment: Shipment, message: Tensor, handoff: int) -> list[Received]:
    """The slices of a message [bytes] uint8, in its order, each compared with its checksum.

    Raises:
        SliceMismatch: a slice does not have the checksum that came with it; names it.
    """
    found = unverified(shipment, message, handoff)
    for each in found:
        each.verify()
    return found


def unverified(shipment: Shipment, message: Tensor, handoff: int) -> list[Received]:
    """As ``unpack``, for who calls ``verify`` on each; on a GPU they are compared here, with one wait for all."""
    slots = shipment.bucket.slots
    came = [signed % (1 << 64) for signed in message[payload_bytes(shipment) :].view(torch.int64).tolist()]
    at_hand: list[int | None] = [None] * len(slots)
    if message.device.type != "cpu":
        sums = Checksums([slot.spec for slot in slots], handoff, message.device)
        for index, slot in enumerate(slots):
            sums.add(index, slot.flat(message))
        at_hand = [*sums.values()]

    def verify(slot: Slot[Slice], expected: int, known: int | None) -> None:
        arrived = checksum(slot.spec, slot.flat(message), handoff) if known is None else known
        if arrived != expected:
            raise SliceMismatch(
                f"{slot.spec} from trainer rank {shipment.source} did not arrive as it was sent in handoff {handoff}: "
                f"checksum {arrived:016x}, sent as {expected:016x}"
            )

    return [
        Received(slot.spec, slot.view(message), expected, partial(verify, slot, expected, known))
        for slot, expected, known in zip(slots, came, at_hand, strict=True)
    ]
