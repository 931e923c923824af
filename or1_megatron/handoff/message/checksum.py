"""64 bits that tell one slice, of one tensor, in one handoff, from any other bytes."""

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
    """Of some slices: each is added up while its bytes are at hand, then all are finished together.

    On a GPU, one by one would be a wait for the device each.

    A slice's 8-byte words are laid out in rows of 1,024, the rows added, the sums weighted and added; the tensor's name
    and place and the number of the handoff are added to that. Any single changed word changes it for certain, since
    its weight is odd; other changes pass with odds of 2^-64, save words that change places a multiple of 8 KiB apart.
    """

    def __init__(self, cuts: Sequence[Slice], handoff: int, device: torch.device) -> None:
        self._cuts, self._handoff = cuts, handoff
        self._on_host = [0] * len(cuts)
        self._on_device = None if device.type == "cpu" else DeviceSums(len(cuts), device)

    def add(self, index: int, flat: Tensor | Content) -> None:
        """``flat`` [bytes] uint8: slice ``index``."""
        if self._on_device is None:
            self._on_host[index] = host_sum(_on_host(flat))
        else:
            assert isinstance(flat, Tensor)
            self._on_device.add(index, flat)

    def values(self) -> list[int]:
        """Of each slice, in the order of the slices; unsigned."""
        totals = self._on_host if self._on_device is None else self._on_device.totals()
        return [_named(cut, total, self._handoff) for cut, total in zip(self._cuts, totals, strict=True)]


def checksum(cut: Slice, flat: Tensor | Content, handoff: int) -> int:
    """Of one slice: ``flat`` [bytes] uint8, a tensor on any device or an array."""
    if isinstance(flat, np.ndarray) or flat.device.type == "cpu":
        return _named(cut, host_sum(_on_host(flat)), handoff)
    sums = Checksums([cut], handoff, flat.device)
    sums.add(0, flat)
    return sums.values()[0]


def _on_host(flat: Tensor | Content) -> Content:
    return flat if isinstance(flat, np.ndarray) else flat.numpy()


def _named(cut: Slice, total: int, handoff: int) -> int:
    return (total + _identity(cut) + handoff * _PER_HANDOFF) & _MASK


@cache
def _weights(device: torch.device) -> Tensor:
    """[columns] odd int64: a word's weight depends on its column, so that words that change places show."""
    generator = torch.Generator().manual_seed(20250522)
    return (torch.randint(-(1 << 62), 1 << 62, (_COLUMNS,), generator=generator) * 2 + 1).to(device)


@cache
def _host_weights() -> NDArray[np.int64]:
    return _weights(torch.device("cpu")).numpy()


@cache
def _identity(cut: Slice) -> int:
    digest = hashlib.blake2b(f"{cut.name} {cut.box} {cut.dtype}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def host_sum(content: Content) -> int:
    """The weighted sum, modulo 2^64, by NumPy, which takes a fifth of torch's time for it.

    Few calls: each comes with the caches full of weights, and costs several times what it does alone.
    """
    if end := content.size % _WORD:
        content, rest = content[:-end], content[-end:].tobytes()
    words = content.view(np.int64)
    tail = words.size % _COLUMNS
    # What does not fill a row counts three times, lest it stand for a row of its own.
    total = 3 * int(words[words.size - tail :] @ _host_weights()[:tail]) if tail else 0
    if words.size > tail:
        total += int(np.add.reduce(words[: words.size - tail].reshape(-1, _COLUMNS), axis=0) @ _host_weights())
    return (total + (_end_sum(rest) if end else 0)) & _MASK


def _end_sum(end: bytes) -> int:
    """What does not fill a word."""
    return int.from_bytes(end, "little")


class DeviceSums:
    """The same, where the bytes are."""

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
            totals[index] += _end_sum(bytes(end.tolist()))
        return [total & _MASK for total in totals]
