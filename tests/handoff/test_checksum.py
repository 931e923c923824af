"""What a checksum tells apart. That no two slices of a real model collide is a matter of odds, not shown here."""

from __future__ import annotations

import pytest
import torch

from or1_megatron.handoff.failures import SliceMismatch
from or1_megatron.handoff.message.checksum import checksum, device_sum, host_sum
from or1_megatron.handoff.message.shipment import Shipment, pack, unpack
from or1_megatron.handoff.message.slices import Slice
from or1_megatron.handoff.send_plan import make_plan
from or1_megatron.weights.holdings import Holding

W = Slice("w", ((0, 100), (0, 30)), torch.float32)


def content(size: int = 12_000) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_any_flipped_bit_shows() -> None:
    flat = content()
    true = checksum(W, flat, 1)
    for byte in (*range(0, 12_000, 997), 8191, 8192, 11_999):
        for bit in (0, 7):
            flat[byte] ^= 1 << bit
            assert checksum(W, flat, 1) != true, f"bit {bit} of byte {byte}"
            flat[byte] ^= 1 << bit
    assert checksum(W, flat, 1) == true


def test_words_that_change_places_show() -> None:
    flat = content()
    swapped = flat.clone()
    swapped[:8], swapped[8:16] = flat[8:16], flat[:8]
    assert checksum(W, flat, 1) != checksum(W, swapped, 1)


def test_it_belongs_to_one_slice_of_one_handoff() -> None:
    flat = content()
    others = [
        checksum(Slice("v", W.box, W.dtype), flat, 1),
        checksum(Slice("w", ((100, 200), (0, 30)), W.dtype), flat, 1),
        checksum(W, flat, 2),
    ]
    assert len({checksum(W, flat, 1), *others}) == 4


@pytest.mark.parametrize("size", [0, 1, 7, 8, 8191, 8192, 8200])
def test_sizes_that_are_no_multiples(size: int) -> None:
    """The last byte counts, whatever the size."""
    flat = content(max(size, 1))[:size]
    true = checksum(W, flat, 1)
    if size:
        flat = flat.clone()
        flat[-1] ^= 1
        assert checksum(W, flat, 1) != true


def test_a_device_adds_up_as_the_host_does() -> None:
    """Both run on the CPU here, for all kinds of sizes and starts."""
    base = content(40_000)
    parts = [
        base[:0],
        base[:8],
        base[16 : 16 + 8192],
        base[8 : 8 + 8200],
        base[6 : 6 + 24_000],
        base[1:9],
        base[8 : 8 + 8203],
    ]
    host = [host_sum(part.numpy()) for part in parts]
    assert host == [int(device_sum(part)) % (1 << 64) for part in parts]
    assert len(set(host)) == len(parts)


def shipment() -> Shipment:
    held = [Holding("w", ((0, 3),), (0,)), Holding("v", ((0, 5),), (0,))]
    wants = [[Slice("w", ((0, 3),), torch.bfloat16), Slice("v", ((0, 5),), torch.float32)]]
    (only,) = make_plan(held, wants, 1, 1 << 10).shipments
    return only


def test_a_sealed_shipment_opens_to_what_was_put_in() -> None:
    sent = shipment()
    message = torch.zeros(sent.size_bytes, dtype=torch.uint8)
    w, v = torch.tensor([1, 2, 3], dtype=torch.bfloat16), torch.arange(5.0)
    total = pack(sent, message, lambda part: {"w": w, "v": v}[part.name], 7)
    slices = unpack(sent, message, 7)
    for each in slices:
        each.verify()
    assert sum(each.checksum for each in slices) == total
    assert [each.slice.name for each in slices] == ["w", "v"]
    assert torch.equal(slices[0].values, w) and torch.equal(slices[1].values, v)
    with pytest.raises(SliceMismatch, match=r"'w'\[0:3\] from trainer rank 0 .* handoff 8"):
        unpack(sent, message, 8)[0].verify()
    slices[1].values[4] = 5.0
    with pytest.raises(SliceMismatch, match=r"'v'\[0:5\]"):
        unpack(sent, message, 7)[1].verify()


def test_a_slice_that_is_kept_outlives_its_message() -> None:
    sent = shipment()
    message = torch.zeros(sent.size_bytes, dtype=torch.uint8)
    pack(sent, message, lambda part: torch.arange(part.shape[0]).to(part.dtype), 1)
    kept, spoilt = unpack(sent, message, 1)
    kept.keep()
    message.zero_()
    assert kept.values.tolist() == [0, 1, 2]
    with pytest.raises(SliceMismatch, match=r"'v'\[0:5\]"):
        spoilt.keep()
