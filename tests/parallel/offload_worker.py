"""Two data-parallel ranks: for each kind of optimizer, a policy that moves to the host and back between updates, beside
one that stays on the device. JSON from rank 0: for each case, what was seen on both ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import problem
import torch
import torch.distributed as dist
from torch import Tensor

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.offload import Offload
from or1_megatron.parallel.policy import MegatronPolicy

SLAB_BYTES = 100_001  # odd, and smaller than any flat buffer: copies are cut within storages and across them
CASES = [(dtype, distributed) for dtype in ("float32", "bfloat16") for distributed in (False, True)]


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


def compare(make: Callable[[], MegatronPolicy], batch: Any, data_rank: int) -> dict[str, Any]:
    """Compare three updates, with moves to the host before, between and after them, with three without."""

    def update(policy: MegatronPolicy) -> float:
        return policy.update(batch.ranks[data_rank], problem.WeightedLogProb(), batch.token_count).grad_norm

    stays, moves = make(), make()
    norms = [update(stays) for _ in range(3)]
    offload = Offload(moves.chunks, moves.optimizer, SLAB_BYTES)
    seen: dict[str, Any] = {"moved first": offload.offload("optimizer")}  # before there are any moments
    offload.restore("optimizer")
    found = [update(moves)]

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

    found.append(update(moves))
    offload.offload("optimizer", "gradients")  # a turn in which the parameters stay
    offload.restore("gradients", "optimizer")
    found.append(update(moves))
    seen["gradient norms"] = [norms, found]
    seen["parameters after"] = same(parameters(moves), parameters(stays))
    seen["optimizer after"] = same(optimizer_state(moves), optimizer_state(stays))
    return seen


def main() -> None:
    out, model = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    start_process_group(60)
    mesh = build_mesh(ParallelConfig(ranks=2), seed=1)
    batch = problem.batch(mesh.data, 64)
    result = {}
    for dtype, distributed in CASES:
        parallel = ParallelConfig(ranks=2, distributed_optimizer=distributed)

        def make(dtype: Any = dtype, parallel: ParallelConfig = parallel) -> MegatronPolicy:
            return MegatronPolicy(ModelConfig(hf=model, dtype=dtype), parallel, OptimizerConfig(lr=1e-2), mesh)

        seen: list[Any] = [None, None]
        dist.all_gather_object(seen, compare(make, batch, mesh.data_rank))
        result[f"{dtype}, {'distributed' if distributed else 'replicated'}"] = seen
    if mesh.rank == 0:
        out.write_text(json.dumps(result))
    stop_process_group()


if __name__ == "__main__":
    main()
