"""Finds the parameters and optimizer state on this rank for a checkpoint, and their slices of the whole tensors.

Megatron's ``sharded_state_dict`` gives each parameter's name and its slice of a whole tensor, at any parallel
layout. Master weights and moments are cut like their parameter, and Megatron's distributed optimizer further cuts them
over the data-parallel ranks into flat ranges, which are not rectangles of the whole tensor. Megatron's own reshardable
format therefore gathers the ranges at every save, in the foreground. This module divides a flat range into a few
rectangles (part of a row, whole rows, part of a row). So every rank writes its own slices, no rank sends anything, and
any parallel layout can read the slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import or1_megatron.parallel  # noqa: F401  # the CPU device layer comes before Megatron

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from or1_megatron.checkpoint.shard_files import LocalShard, TensorSlice
from or1_megatron.parallel.lora import Adapters
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.weights.decoder import unfused_name
from or1_megatron.weights.holdings import box_shape
from or1_megatron.weights.slicing import Cut

_MOMENTS = ("exp_avg", "exp_avg_sq")


def local_shards(policy: MegatronPolicy) -> list[LocalShard]:
    """Return this rank's shards: parameters, their moments, and master weights if separate from the parameters.

    Adam creates its moments in the first update. Before the first update this function creates them.
    """
    if policy.sgd_steps == 0:
        for optimizer in _optimizers(policy):
            optimizer.init_state_fn(optimizer.optimizer)
    places, writers = _places(policy), _Writers()
    shards = [writers.shard(parameter.detach, place) for parameter, place in places.items()]
    for optimizer in _optimizers(policy):
        shards += _optimizer_shards(optimizer, places, writers)
    return [replace(shard, tensor=partial(_flat, policy, shard.tensor)) for shard in shards]


def _optimizers(policy: MegatronPolicy) -> list[Any]:
    """Return this rank's optimizers, without the empty one that Megatron makes if only experts have adapters."""
    return [each for each in policy.optimizer.chained_optimizers if each.optimizer is not None]


def _flat(policy: MegatronPolicy, tensor: Callable[[], Tensor]) -> Tensor:
    """Return the tensor as a flat view, from host memory if it is offloaded, else from the device."""
    return policy.host.readable(tensor().detach()).view(-1)


def set_steps(policy: MegatronPolicy, steps: int) -> None:
    """Set the number of SGD steps for the learning rate, and in each of Adam's parameter groups."""
    policy.sgd_steps = steps
    for optimizer in _optimizers(policy):
        for group in optimizer.optimizer.param_groups:
            group["step"] = steps


def restart_optimizer(policy: MegatronPolicy) -> None:
    """Set this rank's moments and step counts to 0, but keep the master weights."""
    policy.host.require("restart_optimizer", "optimizer")
    for shard in local_shards(policy):
        if any(part.key.startswith(tuple(f"optimizer.state.{name}." for name in _MOMENTS)) for part in shard.slices):
            shard.tensor().zero_()
    set_steps(policy, 0)


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter's position in the whole tensors, as one shard or as consecutive shards (fused gate and up)."""

    key: str
    shards: tuple[ShardedTensor, ...]  # their data are views of one meta tensor of the parameter's shape
    replica: tuple[int, ...]  # (PP, TP, DP): all 0 on the rank that writes a replicated tensor in Megatron
    count: int
    of_expert: bool
    """Whether the parameter belongs to an expert. Expert parameters have fewer DP replicas."""

    def slices(self, first: int, last: int, prefix: str = "") -> tuple[TensorSlice, ...]:
        """Return the elements [first, last) of the flat parameter as slices, whose ``start`` counts from ``first``."""
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
    def is_first(self) -> bool:
        """Return whether this rank is the first of the PP and TP ranks that hold these elements."""
        return not any(self.replica[:2])

    @property
    def may_differ(self) -> bool:
        return any(shard.allow_shape_mismatch for shard in self.shards)


def slices_of(sizes: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements [first, last) of a row-major array into rectangles, and yield (offset, sizes) of each in order.

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


def _places(policy: MegatronPolicy) -> dict[Parameter, _Place]:
    """Return the position of every trained parameter of this rank in the whole tensors.

    Positions come from Megatron's ``sharded_state_dict``; those of LoRA's adapters come from the weight table.

    Names do not depend on the layers' implementation (local or Transformer Engine), so that a checkpoint of one loads
    into the other. Transformer Engine's ``_extra_state`` is left out, because it is empty without fp8.
    """
    if policy.adapters is not None:
        return dict(_adapter_places(policy, policy.adapters))
    places: dict[Parameter, _Place] = {}
    for network in policy.networks:
        for entry in network.sharded_state_dict(metadata={}).values():
            if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                continue
            blank = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
            described = replace(entry, data=blank, key=unfused_name(entry.key))
            built = described.build() if isinstance(entry, ShardedTensorFactory) else described
            shards = built if isinstance(built, list) else list(built.values()) if isinstance(built, dict) else [built]
            is_spread = not getattr(entry.data, "allreduce", True)  # Megatron's mark on experts under EP
            places[entry.data] = _Place(described.key, tuple(shards), tuple(entry.replica_id), blank.numel(), is_spread)
    missing = [
        name for network in policy.networks for name, parameter in network.named_parameters() if parameter not in places
    ]
    assert not missing, f"Megatron's sharded_state_dict lacks {missing}"
    return places


def _adapter_places(policy: MegatronPolicy, adapters: Adapters) -> Iterator[tuple[Parameter, _Place]]:
    shapes = adapters.table.shapes(policy.hf)
    for row, tensor in adapters.weights.local_rows():
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        shards = tuple(
            ShardedTensor(
                key=piece.name,
                data=blank[tuple(slice(*ends) for ends in piece.place)],
                dtype=tensor.dtype,
                local_shape=box_shape(piece.box),
                global_shape=shapes[piece.name],
                global_offset=tuple(start for start, _ in piece.box),
                axis_fragmentations=None,
            )
            for piece in adapters.weights.pieces_of(row)
            if piece.name in adapters.table.names
        )
        is_spread = not getattr(tensor, "allreduce", True)
        replica = (
            0,
            policy.mesh.tensor_rank if row.cut is Cut.WHOLE else 0,
            parallel_state.get_expert_data_parallel_rank() if is_spread else 0,
        )
        assert isinstance(tensor, Parameter)
        yield tensor, _Place(row.megatron, shards, replica, tensor.numel(), is_spread)


class _Writers:
    """Chooses a writer for each shard that data-parallel ranks share, so that all ranks write about equally much."""

    def __init__(self) -> None:
        self._rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._load = [0] * parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def shard(self, tensor: Callable[[], Tensor], place: _Place, prefix: str = "") -> LocalShard:
        """Return a parameter, or optimizer state of the parameter's shape, as a shard that one rank writes."""
        slices = place.slices(0, place.count, prefix)
        if place.of_expert:
            return LocalShard(tensor, slices, not any(place.replica), place.may_differ)
        writer = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[writer] += place.count
        mine = place.is_first and writer == self._rank
        return LocalShard(tensor, slices, mine, place.may_differ)


def _optimizer_shards(
    optimizer: MegatronOptimizer, places: Mapping[Parameter, _Place], writers: _Writers
) -> Iterator[LocalShard]:
    """Yield shards of the master weights and moments that the optimizer holds on this rank."""
    for parameter, place in places.items():
        # An fp32 parameter is its own master.
        names = _MOMENTS if parameter.dtype is torch.float32 else ("param", *_MOMENTS)
        if _state(optimizer, parameter, names[-1]) is None:
            continue
        for name in names:
            state, prefix = partial(_state, optimizer, parameter, name), f"optimizer.state.{name}."
            if isinstance(optimizer, DistributedOptimizer):
                part = optimizer._get_model_param_range_map(parameter)["param"]
                is_first = place.is_first and optimizer.distributed_optimizer_instance_id == 0
                yield LocalShard(state, place.slices(part.start, part.end, prefix), is_first, place.may_differ)
            else:
                yield writers.shard(state, place, prefix)


def _state(optimizer: MegatronOptimizer, parameter: Parameter, name: str) -> Any:
    """Return this rank's part of the parameter's master weights (``param``) or of moment ``name``; None if absent."""
    if isinstance(optimizer, DistributedOptimizer):
        held = parameter in optimizer.model_param_group_index_map
        return optimizer._get_main_param_and_optimizer_states(parameter)[name] if held else None
    main = getattr(parameter, "main_param", None)
    main = parameter if main is None else main
    state = optimizer.optimizer.state
    return None if main not in state else main if name == "param" else state[main][name]
