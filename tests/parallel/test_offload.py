"""Offload between phases: memory is freed, all comes back to the bit, and training continues as without it.

Two data-parallel ranks, every optimizer that Megatron builds for us: fp32 and bf16 with fp32 masters, replicated and
distributed. The policies' own tensors are looked at, by other ways than those by which offload finds them.

Not proven here: page-locked memory, copies beside streams that still work, and that the device has more free memory
afterwards (`or1 selftest offload`); here host and device are the same memory, and what shrinks is the storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import problem
import pytest
import ranks
import torch
from torch import Tensor

from or1_megatron.parallel.offload import HostCopy, Offload
from or1_megatron.parallel.policy import MegatronPolicy

CASES = ["float32, replicated", "float32, distributed", "bfloat16, replicated", "bfloat16, distributed"]
THINGS = ["gradients", "optimizer", "parameters"]
SLAB_BYTES = 100_001  # odd, and smaller than any flat buffer: copies are cut within storages and across them


def parameters(policy: MegatronPolicy) -> Iterator[Tensor]:
    return (p for chunk in policy.chunks for p in chunk.module.parameters())


def gradients(policy: MegatronPolicy) -> Iterator[Tensor]:
    return (p.main_grad for p in parameters(policy))  # type: ignore[attr-defined]


def optimizer_state(policy: MegatronPolicy) -> Iterator[Tensor]:
    """Moments, and master weights by the attributes of Megatron's optimizers."""
    for one in policy.optimizer.chained_optimizers:
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            yield from (p for group in getattr(one, name, []) for p in group)
        for state in one.optimizer.state.values():
            yield from (state["exp_avg"], state["exp_avg_sq"])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of these tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def refusal(offload: Offload) -> str:
    try:
        offload.require("an update", "parameters", "optimizer")
    except RuntimeError as error:
        return str(error)
    return ""


def move_between_updates(model: Path, dtype: str, distributed: bool) -> dict[str, Any]:
    """Compare three updates, with moves to the host before, between and after them, with three without."""

    def make() -> MegatronPolicy:
        return problem.make_policy(model, dtype, 1e-2, ranks=2, distributed_optimizer=distributed)

    def update(policy: MegatronPolicy) -> float:
        return problem.update(policy, batch).grad_norm

    batch = problem.batch(2, 64)
    stays, moves = make(), make()
    norms = [update(stays) for _ in range(3)]
    offload = Offload(moves.chunks, moves.optimizer, SLAB_BYTES)
    seen: dict[str, Any] = {"moved first": offload.offload("optimizer")}  # before there are any moments
    offload.restore("optimizer")
    moved_norms = [update(moves)]

    things: dict[str, Callable[[MegatronPolicy], Iterator[Tensor]]] = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer_state,
    }
    held = {name: storage_bytes(of(moves)) for name, of in things.items()}
    kept = {name: copies(of(moves)) for name, of in things.items()}
    freed = {
        "gradients": offload.offload("gradients"),
        "optimizer": offload.offload("optimizer"),
        "parameters": offload.offload("parameters"),
    }
    seen["again"] = [offload.offload("parameters"), offload.offload("optimizer"), offload.offload("gradients")]
    seen["held"], seen["freed"] = held, freed
    seen["left"] = {name: storage_bytes(of(moves)) for name, of in things.items()}
    # whole tensors, whether cut at a slab's end or not, and flat as a save sees them
    seen["readable away"] = all(
        same((offload.readable(t.detach()) for t in things[name](moves)), kept[name])
        for name in ("parameters", "optimizer")
    ) and same(
        (offload.readable(p.detach().view(-1)) for p in parameters(moves)),
        (p.view(-1) for p in kept["parameters"]),
    )
    seen["away"], seen["refusal"] = sorted(offload.away), refusal(offload)
    # another order back than away
    back = {"parameters": offload.restore("parameters"), "gradients": offload.restore("gradients")}
    seen["away, optimizer left"] = sorted(offload.away)
    seen["back"] = {**back, "optimizer": offload.restore("optimizer")}
    seen["back again"] = [offload.restore("optimizer"), offload.restore("parameters"), offload.restore("gradients")]
    seen["refused when back"] = refusal(offload)
    one = next(parameters(moves)).detach()
    seen["readable back"] = offload.readable(one) is one
    seen["parameters exact"] = same(parameters(moves), kept["parameters"])
    seen["optimizer exact"] = same(optimizer_state(moves), kept["optimizer"])
    seen["gradients zero"] = all(not g.any() for g in gradients(moves))
    seen["gradients were not"] = any(bool(g.any()) for g in kept["gradients"])

    moved_norms.append(update(moves))
    offload.offload("optimizer", "gradients")  # a turn in which the parameters stay
    offload.restore("gradients", "optimizer")
    moved_norms.append(update(moves))
    seen["gradient norms"] = [norms, moved_norms]
    seen["parameters after"] = same(parameters(moves), parameters(stays))
    seen["optimizer after"] = same(optimizer_state(moves), optimizer_state(stays))
    return seen


def move_in_all_cases(model: Path) -> dict[str, Any]:
    named = {case: case.split(", ") for case in CASES}
    return {case: move_between_updates(model, dtype, kind == "distributed") for case, (dtype, kind) in named.items()}


@pytest.fixture(scope="module")
def seen(tiny_qwen2: Path) -> dict[str, list[Any]]:
    """What each of the two ranks saw, by case."""
    everyone = ranks.call(move_in_all_cases, 2, tiny_qwen2)
    return {case: [mine[case] for mine in everyone] for case in CASES}


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
def test_moves_to_the_host_and_back(seen: Any, case: str) -> None:
    """The bytes reported as freed are those that were held, and none of them are left; all comes back to the bit, but
    gradients, which come back as zeros. Moving twice, and in any order, is harmless. Before the first update only
    master weights are moved, where there are any. What is away can be read, as a checkpoint does. Three updates with
    moves before, between and after them equal three without."""
    for rank in seen[case]:
        assert rank["freed"] == rank["held"] == rank["back"]
        assert all(rank["freed"][thing] > 0 for thing in THINGS)
        assert rank["left"] == dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
        assert rank["parameters exact"] and rank["optimizer exact"]
        assert rank["gradients were not"] and rank["gradients zero"]
        assert rank["again"] == rank["back again"] == [0, 0, 0]
        assert rank["away, optimizer left"] == ["optimizer"]
        assert rank["moved first"] == (rank["held"]["optimizer"] / 3 if case.startswith("bfloat16") else 0)
        assert rank["readable away"] and rank["readable back"]
        without, with_moves = rank["gradient norms"]
        assert with_moves == without
        assert rank["parameters after"] and rank["optimizer after"]


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
