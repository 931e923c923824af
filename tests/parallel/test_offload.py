"""Offload between phases: memory is freed, all comes back to the bit, and training continues as without it.

Two data-parallel ranks, every optimizer that Megatron builds for us: fp32 and bf16 with fp32 masters, replicated and
distributed. The policies' own tensors are looked at, by other ways than those by which offload finds them.

Not proven here: page-locked memory, copies beside streams that still work, and that the device has more free memory
afterwards (`or1 selftest offload`); here host and device are the same memory, and what shrinks is the storages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from or1_megatron.parallel.offload import HostCopy

CASES = ["float32, replicated", "float32, distributed", "bfloat16, replicated", "bfloat16, distributed"]
THINGS = ["gradients", "optimizer", "parameters"]


@pytest.fixture(scope="module")
def seen(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ranks.run_json("offload_worker.py", 2, tmp_path_factory.mktemp("offload") / "out.json", str(tiny_qwen2))


@pytest.mark.parametrize("case", CASES)
def test_memory_is_freed(seen: Any, case: str) -> None:
    """The bytes reported as freed are those that were held, and none of them are left."""
    for rank in seen[case]:
        assert rank["freed"] == rank["held"] == rank["back"]
        assert all(rank["freed"][thing] > 0 for thing in THINGS)
        assert rank["left"] == dict.fromkeys(("parameters", "gradients", "optimizer"), 0)


def test_bytes_worked_by_hand(seen: Any) -> None:
    """n parameters: gradients 4n; bf16 2n and fp32 masters and two moments 12n, the last halved over two ranks.

    The distributed optimizer's buffers are padded: by 64 elements per parameter and 128 at the end at most.
    """
    # 61 rows of embedding and head; per layer q, k, v, o, biases, MLP, two norms; the final norm
    n = 2 * 61 * 64 + 4 * (64 * 64 * 2 + 64 * 32 * 2 + 64 + 2 * 32 + 3 * 64 * 96 + 2 * 64) + 64
    n_padded_at_most = n + (3 + 4 * 7) * 64 + 128
    bf16 = seen["bfloat16, replicated"][0]["freed"]
    assert bf16 == {"gradients": 4 * n, "optimizer": 12 * n, "parameters": 2 * n}
    assert seen["float32, replicated"][0]["freed"] == {"gradients": 4 * n, "optimizer": 8 * n, "parameters": 4 * n}
    both = seen["bfloat16, distributed"]
    assert 12 * n <= sum(rank["freed"]["optimizer"] for rank in both) <= 12 * n_padded_at_most
    assert 2 * n <= both[0]["freed"]["parameters"] <= 2 * n_padded_at_most


@pytest.mark.parametrize("case", CASES)
def test_comes_back_to_the_bit(seen: Any, case: str) -> None:
    for rank in seen[case]:
        assert rank["parameters exact"] and rank["optimizer exact"]
        assert rank["gradients were not"] and rank["gradients zero"]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_without(seen: Any, case: str) -> None:
    """Three updates with moves to the host before, between and after them equal three without, to the bit."""
    for rank in seen[case]:
        without, with_turns = rank["gradient norms"]
        assert with_turns == without
        assert rank["parameters after"] and rank["optimizer after"]


@pytest.mark.parametrize("case", CASES)
def test_twice_and_in_any_order_is_harmless(seen: Any, case: str) -> None:
    for rank in seen[case]:
        assert rank["again"] == [0, 0, 0]
        assert rank["back again"] == [0, 0, 0]
        assert rank["away, optimizer left"] == ["optimizer"]


@pytest.mark.parametrize("case", CASES)
def test_before_the_first_update(seen: Any, case: str) -> None:
    """An optimizer that has no moments yet: only master weights are moved, where there are any."""
    for rank in seen[case]:
        masters = rank["held"]["optimizer"] / 3 if case.startswith("bfloat16") else 0
        assert rank["moved first"] == masters


@pytest.mark.parametrize("case", CASES)
def test_can_be_read_while_away(seen: Any, case: str) -> None:
    """As a checkpoint reads: every parameter, master and moment, to the bit; the tensor itself when it is back."""
    for rank in seen[case]:
        assert rank["readable away"] and rank["readable back"]


def test_use_while_away_is_refused(seen: Any) -> None:
    rank = seen["bfloat16, distributed"][0]
    assert rank["away"] == ["gradients", "optimizer", "parameters"]
    assert rank["refusal"] == "an update needs the parameters and optimizer, offloaded to the host: restore first"
    assert rank["refused when back"] == ""


@pytest.mark.parametrize("slab_bytes", [16, 24, 1024])
def test_storages_of_any_size(slab_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are no whole words, one after another and over several slabs: read, and back to the bit."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in (5, 16, 3, 40, 1, 8)]
    before = [tensor.clone() for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]
    host = HostCopy(slab_bytes)
    assert host.take(storages) == 73 and not any(storage.nbytes() for storage in storages)
    for tensor, expected in zip(tensors, before, strict=True):
        held = host.read(tensor)
        assert held is not None and torch.equal(held, expected)
    assert host.give_back() == 73 and all(map(torch.equal, tensors, before))
