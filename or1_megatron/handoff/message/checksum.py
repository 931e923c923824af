"""64-bit checksums of tensor slices, which also depend on the slice's name and position and on the handoff's number.

A slice's 8-byte words are laid out in rows of 1,024 words. The checksum is the weighted sum of the column sums, plus a
hash of the slice's name, position and dtype, plus a multiple of the handoff's number. A single changed word always
changes the checksum, because the sum's weights are odd. A swap of two words of one column (a multiple of 8 KiB apart)
in complete rows is always missed. Any other change is missed with a probability of 2^-64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from or1_megatron.handoff.message.slices import Slice

_WORD, _COLUMNS = 8, 1024
_MASK = (1 << 64) - 1
_PER_HANDOFF = 0x9E3779B97F4A7C15  # odd, so that no two handoffs are alike


def word_sum(flat: Tensor) -> int | Tensor:
    """Return the sum of a slice's 8-byte words, weighted by column, modulo 2^64. ``flat``: the slice's bytes [n] uint8.

    For a tensor on a GPU the result is an int64 tensor [], and the host does not wait for it.
    """
    return host_sum(flat.numpy()) if flat.device.type == "cpu" else device_sum(flat)


def checksums(slices: Sequence[Slice], sums: Sequence[int | Tensor], handoff: int) -> list[int]:
    """Return each slice's unsigned checksum from its ``word_sum``. Waits for the GPU once, for all slices."""
    if sums and isinstance(sums[0], Tensor):
        sums = torch.stack(cast(list[Tensor], list(sums))).tolist()
    offset = handoff * _PER_HANDOFF
    return [(int(total) + _identity(part) + offset) & _MASK for part, total in zip(slices, sums, strict=True)]


def checksum(part: Slice, flat: Tensor, handoff: int) -> int:
    """Return the checksum of one slice, whose bytes are ``flat`` [bytes] uint8 on any device."""
    return checksums([part], [word_sum(flat)], handoff)[0]


@cache
def _weights(device: torch.device) -> Tensor:
    """Return odd int64 weights [columns]. They differ between columns, so that swaps within a row are noticed."""
    generator = torch.Generator().manual_seed(20250522)
    return (torch.randint(-(1 << 62), 1 << 62, (_COLUMNS,), generator=generator) * 2 + 1).to(device)


@cache
def _host_weights() -> NDArray[np.int64]:
    return _weights(torch.device("cpu")).numpy()


@cache
def _identity(part: Slice) -> int:
    digest = hashlib.blake2b(f"{part.name} {part.box} {part.dtype}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def host_sum(content: NDArray[np.uint8]) -> int:
    """Return the ``word_sum`` of the bytes [n], computed by NumPy in a fifth of torch's time.

    There are few calls of NumPy, because a call is several times slower while the caches are full of model weights.
    """
    if end := content.size % _WORD:
        content, rest = content[:-end], content[-end:].tobytes()
    words = content.view(np.int64)
    tail = words.size % _COLUMNS
    # An incomplete last row counts three times, so that it differs from a complete row.
    total = 3 * int(words[words.size - tail :] @ _host_weights()[:tail]) if tail else 0
    if words.size > tail:
        total += int(np.add.reduce(words[: words.size - tail].reshape(-1, _COLUMNS), axis=0) @ _host_weights())
    return (total + (int.from_bytes(rest, "little") if end else 0)) & _MASK


def device_sum(flat: Tensor) -> Tensor:
    """Return the result of ``host_sum`` as a tensor [] int64 on the device that holds the bytes."""
    whole = flat.numel() // _WORD * _WORD
    rest = flat.new_zeros(_WORD)
    rest[: flat.numel() - whole] = flat[whole:]
    if flat.storage_offset() % _WORD:  # a part of a parameter
        flat = flat.clone()
    words = flat[:whole].view(torch.int64)
    rows = words.numel() // _COLUMNS * _COLUMNS
    columns = words[:rows].view(-1, _COLUMNS).sum(0)
    columns[: words.numel() - rows] += 3 * words[rows:]
    return (columns * _weights(flat.device)).sum() + rest.view(torch.int64)[0]
