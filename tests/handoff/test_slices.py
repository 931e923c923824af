"""The places of slices in messages, by hand."""

from __future__ import annotations

import torch

from or1_megatron.handoff.message.slices import Slice, plan_buckets, whole_tensor


def flat(name: str, elements: int, dtype: torch.dtype = torch.float32) -> Slice:
    return whole_tensor(name, dtype, (elements,))


def test_plan_by_hand() -> None:
    """Bucket of 64 bytes: a (20 B) at 0, b (6 B) aligned to 32, c (40 B) starts the next, d (100 B) is too large."""
    slices = [flat("a", 5), flat("b", 3, torch.bfloat16), flat("c", 10), flat("d", 25), flat("e", 1)]
    plan = plan_buckets(slices, 64)
    places = [[(slot.slice.name, slot.offset_bytes) for slot in bucket] for bucket in plan]
    assert places == [[("a", 0), ("b", 32)], [("c", 0)], [("d", 0)], [("e", 0)]]
    assert [bucket[-1].end_bytes for bucket in plan] == [38, 40, 100, 4]


def test_tensors_come_out_of_a_bucket_as_they_went_in() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": torch.randn(3, 5, generator=generator),
        "h": torch.randn(7, generator=generator).to(torch.bfloat16),
        "x": torch.randn(2, 2, 2, generator=generator),
    }
    (bucket,) = plan_buckets([whole_tensor(n, t.dtype, t.shape) for n, t in tensors.items()], 1 << 10)
    message = torch.zeros(bucket[-1].end_bytes, dtype=torch.uint8)
    for slot in bucket:
        slot.view(message).copy_(tensors[slot.slice.name])
    for slot in bucket:
        assert torch.equal(slot.view(message), tensors[slot.slice.name])


def test_no_tensors_no_buckets() -> None:
    assert plan_buckets([], 64) == []
