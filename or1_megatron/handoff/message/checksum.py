"""Checksums of 64 bits that tell one slice, of one tensor, in one handoff, from any other bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from or1_megatron.handoff.message.buckets import Slice

Content = NDArray[np.uint8]
"""[bytes] on the host."""

_WORD, _COLUMNS = 8, 1024
_MASK = (1 << 64) - 1
_PER_HANDOFF = 0x9E3779B97F4A7C15  # odd, so that no two handoffs are alike


class Checksums:
    """The checksums of some slices: each is summed while its bytes are at hand, and all are finished together.

    On a GPU, finishing them one by one would wait for the device each time.

    A slice's 8-byte words are laid out in rows of 1,024, the rows added, the sums weighted and added; the tensor's name
    and place and the number of the handoff are added to that. Any single changed word changes the checksum, since
    its weight is odd; other changes pass with odds of 2^-64, except words that change places by a multiple of 8 KiB.
    """

    def __init__(self, slices: Sequence[Slice], handoff: int, device: torch.device) -> None:
        self._slices, self._handoff = slices, handoff
        self._on_host = [0] * len(slices)
        self._on_device = None if device.type == "cpu" else DeviceSums(len(slices), device)

    def add(self, index: int, flat: Tensor | Content) -> None:
        """Sum slice ``index``: ``flat`` [bytes] uint8."""
        if self._on_device is None:
            self._on_host[index] = host_sum(flat if isinstance(flat, np.ndarray) else flat.numpy())
        else:
            assert isinstance(flat, Tensor)
            self._on_device.add(index, flat)

    def values(self) -> list[int]:
        """Return the checksum of each slice, in their order; unsigned."""
        totals = self._on_host if self._on_device is None else self._on_device.totals()
        offset = self._handoff * _PER_HANDOFF
        return [(total + _identity(each) + offset) & _MASK for each, total in zip(self._slices, totals, strict=True)]


def checksum(part: Slice, flat: Tensor | Content, handoff: int) -> int:
    """Return the checksum of one slice: ``flat`` [bytes] uint8, a tensor on any device or an array."""
    device = torch.device("cpu") if isinstance(flat, np.ndarray) else flat.device
    sums = Checksums([part], handoff, device)
    sums.add(0, flat)
    return sums.values()[0]


@cache
def _weights(device: torch.device) -> Tensor:
    """Return [columns] odd int64. A word's weight depends on its column, so that words that change places show."""
    generator = torch.Generator().manual_seed(20250522)
    return (torch.randint(-(1 << 62), 1 << 62, (_COLUMNS,), generator=generator) * 2 + 1).to(device)


@cache
def _host_weights() -> NDArray[np.int64]:
    return _weights(torch.device("cpu")).numpy()


@cache
def _identity(part: Slice) -> int:
    digest = hashlib.blake2b(f"{part.name} {part.box} {part.dtype}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def host_sum(content: Content) -> int:
    """Return the weighted sum, modulo 2^64, by NumPy, which needs a fifth of torch's time.

    With few calls: each is made while the caches are full of weights, and then costs several times what it does alone.
    """
    if end := content.size % _WORD:
        content, rest = content[:-end], content[-end:].tobytes()
    words = content.view(np.int64)
    tail = words.size % _COLUMNS
    # What does not fill a row counts three times, so that it differs from a row of its own.
    total = 3 * int(words[words.size - tail :] @ _host_weights()[:tail]) if tail else 0
    if words.size > tail:
        total += int(np.add.reduce(words[: words.size - tail].reshape(-1, _COLUMNS), axis=0) @ _host_weights())
    return (total + (int.from_bytes(rest, "little") if end else 0)) & _MASK


class DeviceSums:
    """The same sums on the device that holds the bytes."""

    def __init__(self, slices: int, device: torch.device) -> None:
        self._rows = torch.zeros(slices, _COLUMNS, dtype=torch.int64, device=device)
        self._ends: dict[int, Tensor] = {}

    def add(self, index: int, flat: Tensor) -> None:
        whole = flat.numel() // _WORD * _WORD
        if whole < flat.numel():
            self._ends[index] = flat[whole:].clone()
        if flat.storage_offset() % _WORD:  # a part of a parameter
            flat = flat.clone()
        words = flat[:whole].view(torch.int64)
        rows = words.numel() // _COLUMNS * _COLUMNS
        self._rows[index] = words[:rows].view(-1, _COLUMNS).sum(0)
        self._rows[index, : words.numel() - rows] += 3 * words[rows:]

    def totals(self) -> list[int]:
        totals: list[int] = (self._rows * _weights(self._rows.device)).sum(1).tolist()
        for index, end in self._ends.items():
            totals[index] += int.from_bytes(bytes(end.tolist()), "little")
        return [total & _MASK for total in totals]
