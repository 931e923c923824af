"""64 bits that tell one slice, of one tensor, in one handoff, from any other bytes."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

from or1_megatron.handoff.plan import Slice

_COLUMNS = 1024
_MASK = (1 << 64) - 1


@cache
def _weights(device: torch.device) -> Tensor:
    """[columns] odd int64: a word's weight depends on its column, so that words that change places show."""
    generator = torch.Generator().manual_seed(20250522)
    return (torch.randint(-(1 << 62), 1 << 62, (_COLUMNS,), generator=generator) * 2 + 1).to(device)


def checksum(cut: Slice, flat: Tensor, handoff: int) -> int:
    """Of a slice's bytes, its name and place, and the number of the handoff; unsigned, sums modulo 2^64.

    Any single changed word changes it for certain, since its weight is odd; other changes pass with odds of 2^-64,
    save words that change places a multiple of 8 KiB apart.

    Args:
        flat: [bytes] uint8, starting at a multiple of 8 bytes, on any device.
    """
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rows = words[: words.numel() // _COLUMNS * _COLUMNS].view(-1, _COLUMNS).sum(0)
    tail = words[rows.numel() * (words.numel() // _COLUMNS) :]
    weights = _weights(flat.device)
    total = int((rows * weights).sum()) + 3 * int((tail * weights[: tail.numel()]).sum())
    total += int.from_bytes(flat[words.numel() * 8 :].cpu().numpy().tobytes(), "little")
    identity = hashlib.blake2b(f"{handoff} {cut.name} {cut.box} {cut.dtype}".encode(), digest_size=8).digest()
    return (total + int.from_bytes(identity, "little")) & _MASK
