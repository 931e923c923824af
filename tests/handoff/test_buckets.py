"""The plan of the wire, by hand."""

from __future__ import annotations

import torch

from or1_megatron.handoff.message.buckets import TensorSpec, plan_buckets


def spec(name: str, elements: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name, dtype, (elements,))


def test_plan_by_hand() -> None:
    """Bucket of 64 bytes: a (20 B) at 0, b (6 B) aligned to 32, c (40 B) starts the next, d (100 B) is too large."""
    specs = [spec("a", 5), spec("b", 3, torch.bfloat16), spec("c", 10), spec("d", 25), spec("e", 1)]
    plan = plan_buckets(specs, 64)
    places = [[(slot.spec.name, slot.offset_bytes) for slot in bucket.slots] for bucket in plan]
    assert places == [[("a", 0), ("b", 32)], [("c", 0)], [("d", 0)], [("e", 0)]]
    assert [bucket.size_bytes for bucket in plan] == [38, 40, 100, 4]


def test_tensors_come_out_of_a_bucket_as_they_went_in() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": torch.randn(3, 5, generator=generator),
        "h": torch.randn(7, generator=generator).to(torch.bfloat16),
        "x": torch.randn(2, 2, 2, generator=generator),
    }
    (bucket,) = plan_buckets([TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], 1 << 10)
    buffer = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
    for slot in bucket.slots:
        slot.view(buffer).copy_(tensors[slot.spec.name])
    for slot in bucket.slots:
        assert torch.equal(slot.view(buffer), tensors[slot.spec.name])


def test_no_tensors_no_buckets() -> None:
    assert plan_buckets([], 64) == []
