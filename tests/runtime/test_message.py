"""Messages arrive as they were sent, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from or1_megatron.runtime.message import MessageDamaged, pack, unpack


def test_any_flipped_bit_is_found() -> None:
    """Every single bit of a message with an array, its checksum and its length included."""
    message = {"tokens": np.arange(5, dtype=np.int32), "text": "x"}
    packed = pack(message)
    message = unpack(packed)
    assert message["text"] == "x" and message["tokens"].tolist() == [0, 1, 2, 3, 4]
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageDamaged, match=rf"a message of {len(packed)} bytes"):
            unpack(bytes(damaged))
    for short in (b"", packed[:3], packed[:-1], packed + b"\0"):
        with pytest.raises(MessageDamaged):
            unpack(short)
