"""How this process's C library keeps freed memory."""

from __future__ import annotations

import ctypes
from typing import Final

_LARGE_BYTES: Final = 8 << 20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def return_large_blocks() -> None:
    """Return freed blocks of 8 MiB and more to the system at once, from now on, where the C library is glibc.

    By itself glibc raises this threshold to 32 MiB. Smaller freed blocks then stay in its heap and leave holes that are
    too small for later blocks: a trainer rank of a 0.1B grew by 1.2 GiB for its activations, and kept that after the
    update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)  # as large as it would become; the call above fixes it at 128 KiB
