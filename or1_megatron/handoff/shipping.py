"""A shipment as bytes: its slices, then one checksum for each."""

from __future__ import annotations

import torch
from torch import Tensor

from or1_megatron.handoff.checksum import checksum
from or1_megatron.handoff.plan import Shipment, Slice


class SliceMismatch(RuntimeError):
    """A slice did not arrive as it was sent."""


def payload_bytes(shipment: Shipment) -> int:
    return -(-shipment.bucket.size_bytes // 8) * 8


def message_bytes(shipment: Shipment) -> int:
    """On the wire."""
    return payload_bytes(shipment) + 8 * len(shipment.bucket.slots)


def seal(shipment: Shipment, message: Tensor, handoff: int) -> int:
    """Write the checksums behind the slices that ``message`` [bytes] uint8 holds; returns their sum."""
    sums = [_checksum(shipment, index, message, handoff) for index in range(len(shipment.bucket.slots))]
    signed = [value - (1 << 64) if value >= 1 << 63 else value for value in sums]
    message[payload_bytes(shipment) :].view(torch.int64).copy_(torch.tensor(signed, dtype=torch.int64))
    return sum(sums)


def unseal(shipment: Shipment, message: Tensor, handoff: int) -> tuple[list[tuple[Slice, Tensor]], int]:
    """(slices with what arrived of them, views into ``message``; the sum of their checksums).

    Raises:
        SliceMismatch: a slice does not have the checksum that came with it; names it.
    """
    total, found = 0, []
    for index, (slot, expected) in enumerate(zip(shipment.bucket.slots, sealed(shipment, message), strict=True)):
        arrived = _checksum(shipment, index, message, handoff)
        if arrived != expected:
            raise SliceMismatch(
                f"{slot.spec} from trainer rank {shipment.source} did not arrive as it was sent in handoff {handoff}: "
                f"checksum {arrived:016x}, sent as {expected:016x}"
            )
        total += arrived
        found.append((slot.spec, slot.view(message)))
    return found, total


def sealed(shipment: Shipment, message: Tensor) -> list[int]:
    """The checksums that came with a message, slice by slice; unsigned."""
    return [value % (1 << 64) for value in message[payload_bytes(shipment) :].view(torch.int64).tolist()]


def _checksum(shipment: Shipment, index: int, message: Tensor, handoff: int) -> int:
    slot = shipment.bucket.slots[index]
    return checksum(slot.spec, message[slot.offset_bytes : slot.offset_bytes + slot.spec.size_bytes], handoff)
