"""What a checkpoint holds of the policy, and where this rank's part lies in the whole.

Names and places are Megatron's: its ``sharded_state_dict`` says which part of which whole tensor a parameter is, in
any layout. Masters and moments lie where their parameter lies. Megatron's distributed optimizer cuts them by flat
ranges over data-parallel ranks, which are not slices of the whole; its own reshardable format therefore gathers all of
them at every save, in the foreground. Here a flat range becomes the few slices that it is made of (part of a row, whole
rows, part of a row), so that every rank writes what it holds, nobody exchanges anything, and any layout reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.shard_files import LocalShard, TensorSlice

_MOMENTS = ("exp_avg", "exp_avg_sq")


def local_shards(policy: MegatronPolicy) -> list[LocalShard]:
    """All that this rank holds: parameters, and of each its master weights (where they are others) and moments.

    Adam's moments come into being with the first update; for a save or load before it they are made here.
    """
    if policy.sgd_steps == 0:
        for optimizer in policy.optimizer.chained_optimizers:
            optimizer.init_state_fn(optimizer.optimizer)
    readable = policy.host.readable  # wherever it is now
    places = _places(policy)
    replicated = _Shared()
    found = [
        replicated.shard(lambda p=parameter: readable(p.detach()).view(-1), place.slices(0, place.count), place)  # type: ignore[misc]
        for parameter, place in places.items()
    ]
    for optimizer in policy.optimizer.chained_optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            found += _cut_states(optimizer, places, readable)
        else:
            found += _whole_states(optimizer, places, replicated, readable)
    return found


def optimizer_step(policy: MegatronPolicy) -> int:
    """Adam's count of steps, which is one for all parameters."""
    steps = {int(group["step"]) for group in _groups(policy) if "step" in group}
    assert len(steps) <= 1, f"parameter groups have taken different numbers of steps: {steps}"
    return steps.pop() if steps else 0


def set_optimizer_step(policy: MegatronPolicy, step: int) -> None:
    for group in _groups(policy):
        group["step"] = step


def restart_optimizer(policy: MegatronPolicy) -> None:
    """Moments and step counts as before the first step; masters stay. Every rank does it to its own part."""
    policy.host.require("restart_optimizer", "optimizer")
    for shard in local_shards(policy):
        if any(part.key.startswith(tuple(f"optimizer.state.{name}." for name in _MOMENTS)) for part in shard.slices):
            shard.tensor().zero_()
    set_optimizer_step(policy, 0)
    policy.sgd_steps = 0


def _groups(policy: MegatronPolicy) -> Iterator[dict[str, Any]]:
    for optimizer in policy.optimizer.chained_optimizers:
        yield from optimizer.optimizer.param_groups


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter's elements lie: one shard, or several in a row (gate and up, fused)."""

    key: str
    shards: tuple[ShardedTensor, ...]  # their data are views of one meta tensor of the parameter's shape
    replica: tuple[int, ...]  # (PP, TP, DP): all 0 on the rank that would write a replicated tensor
    count: int
    of_expert: bool
    """Its DP replicas are then fewer than the dense parameters': those of its own experts."""

    def slices(self, first: int, last: int, prefix: str = "") -> tuple[TensorSlice, ...]:
        """The elements [first, last) of the parameter, flattened; ``start`` counts from ``first``."""
        made = []
        for shard in self.shards:
            begin = shard.data.storage_offset()
            if not shard.data.is_contiguous():
                raise NotImplementedError(f"{shard.key}: a shard that is not contiguous in its parameter")
            sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
            low, high = max(first, begin), min(last, begin + math.prod(sizes))
            start = low - first
            for inner, lengths in slices_of(sizes, low - begin, high - begin):
                offset = tuple(a + b for a, b in zip(shard.global_offset, inner, strict=True))
                made.append(TensorSlice(prefix + shard.key, tuple(shard.global_shape), offset, lengths, start))
                start += math.prod(lengths)
        return tuple(made)

    @property
    def may_differ(self) -> bool:
        return any(shard.allow_shape_mismatch for shard in self.shards)


def slices_of(sizes: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements [first, last) of a row-major array as (offset, sizes) of slices, in order.

    >>> list(slices_of((4, 5), 3, 16))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    """
    if first >= last:
        return
    if len(sizes) == 1:
        yield (first,), (last - first,)
        return
    row = math.prod(sizes[1:])
    top, bottom = -(-first // row), last // row  # whole rows: [top, bottom)
    parts = [(top - 1, first - (top - 1) * row, row)] if first < top * row else []
    if top > bottom:  # within one row
        parts = [(bottom, first - bottom * row, last - bottom * row)]
    for index, begin, end in parts:
        for offset, lengths in slices_of(sizes[1:], begin, end):
            yield (index, *offset), (1, *lengths)
    if top < bottom:
        yield (top, *(0,) * (len(sizes) - 1)), (bottom - top, *sizes[1:])
    if top <= bottom and last > bottom * row:
        for offset, lengths in slices_of(sizes[1:], 0, last - bottom * row):
            yield (bottom, *offset), (1, *lengths)


def _places(policy: MegatronPolicy) -> dict[torch.nn.Parameter, _Place]:
    """Every parameter of this rank, by what Megatron says of it. Transformer Engine's ``_extra_state`` is left out:
    it holds nothing without fp8, and our own layers have none."""
    places: dict[torch.nn.Parameter, _Place] = {}
    for network in policy.networks:
        for entry in network.sharded_state_dict(metadata={}).values():
            if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                continue
            blank = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
            described = replace(entry, data=blank)
            built = described.build() if isinstance(entry, ShardedTensorFactory) else described
            shards = built if isinstance(built, list) else list(built.values()) if isinstance(built, dict) else [built]
            is_spread = not getattr(entry.data, "allreduce", True)  # Megatron's mark on experts under EP
            places[entry.data] = _Place(entry.key, tuple(shards), tuple(entry.replica_id), blank.numel(), is_spread)
    missing = [
        name for network in policy.networks for name, parameter in network.named_parameters() if parameter not in places
    ]
    assert not missing, f"Megatron's sharded_state_dict lacks {missing}"
    return places


class _Shared:
    """Deals what data-parallel ranks hold in common out among them, so that each writes about as much as the others."""

    def __init__(self) -> None:
        self._rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._load = [0] * parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def shard(self, tensor: Callable[[], Tensor], slices: tuple[TensorSlice, ...], place: _Place) -> LocalShard:
        if place.of_expert:
            return LocalShard(tensor, slices, not any(place.replica), place.may_differ)
        writer = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[writer] += place.count
        mine = not any(place.replica[:2]) and writer == self._rank
        return LocalShard(tensor, slices, mine, place.may_differ)


def _cut_states(
    optimizer: DistributedOptimizer, places: dict[torch.nn.Parameter, _Place], readable: Callable[[Tensor], Tensor]
) -> Iterator[LocalShard]:
    """Masters and moments of the flat ranges that this data-parallel rank updates."""
    for parameter, place in places.items():
        if parameter not in optimizer.model_param_group_index_map:
            continue
        part = optimizer._get_model_param_range_map(parameter)["param"]
        is_first = not any(place.replica[:2]) and optimizer.distributed_optimizer_instance_id == 0
        for name in _names(parameter):

            def tensor(parameter: torch.nn.Parameter = parameter, name: str = name) -> Tensor:
                state: Tensor = optimizer._get_main_param_and_optimizer_states(parameter)[name]
                return readable(state.detach()).view(-1)

            slices = place.slices(part.start, part.end, f"optimizer.state.{name}.")
            yield LocalShard(tensor, slices, is_first, place.may_differ)


def _whole_states(
    optimizer: Any,
    places: dict[torch.nn.Parameter, _Place],
    replicated: _Shared,
    readable: Callable[[Tensor], Tensor],
) -> Iterator[LocalShard]:
    """Masters and moments where every data-parallel rank has them all."""
    inner = optimizer.optimizer
    for parameter, place in places.items():
        main = getattr(parameter, "main_param", None)
        if (parameter if main is None else main) not in inner.state:
            continue
        for name in _names(parameter):

            def tensor(parameter: torch.nn.Parameter = parameter, name: str = name) -> Tensor:
                main = getattr(parameter, "main_param", None)
                main = parameter if main is None else main
                state: Tensor = main if name == "param" else inner.state[main][name]
                return readable(state.detach()).view(-1)

            yield replicated.shard(tensor, place.slices(0, place.count, f"optimizer.state.{name}."), place)


def _names(parameter: torch.nn.Parameter) -> tuple[str, ...]:
    """Of the optimizer's state; an fp32 parameter is its own master."""
    return _MOMENTS if parameter.dtype is torch.float32 else ("param", *_MOMENTS)
