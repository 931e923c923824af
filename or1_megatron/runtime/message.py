"""Messages between the run's processes: pickles with a checksum, which detects bits that flip on the way."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

from or1_megatron.errors import PartLost

_CHECKSUM_BYTES = 4


class MessageDamaged(PartLost, RuntimeError):
    """A message arrived with other bytes than were sent."""


def pack(message: Any) -> bytes:
    """Return the message as bytes for ``unpack``."""
    content = pickle.dumps(message, protocol=5)
    return checksum(content) + content


def unpack(packed: bytes) -> Any:
    """Return the message that ``pack`` was given.

    Raises:
        MessageDamaged: its bytes have changed.
    """
    content = memoryview(packed)[_CHECKSUM_BYTES:]
    if packed[:_CHECKSUM_BYTES] != checksum(content):
        raise MessageDamaged(
            f"a message of {len(packed)} bytes between two processes of the run arrived with other bits than it was "
            "sent with: look at the memory (ECC errors) and network of their machines"
        )
    return pickle.loads(content)


def checksum(content: bytes | memoryview) -> bytes:
    """Return the CRC-32 of the bytes, which any single flipped bit changes."""
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")
