"""Starts torch.distributed and makes the process groups: which ranks share which part of the model and of the batch."""

from __future__ import annotations

import datetime
import gc
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.runtime.world import bind_near, choose_gloo_interface, share_gloo_thread

_START_UP_S = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's index along each axis of parallelism, and the size of each axis."""

    rank: int
    world: int
    tensor_rank: int
    tensor: int
    pipeline_rank: int
    pipeline: int
    context_rank: int
    context: int
    data_rank: int
    data: int
    control: dist.ProcessGroup
    """The group of all ranks, over gloo, for objects and CPU tensors."""
    replica: dist.ProcessGroup
    """The gloo group of the ranks with this rank's data-parallel index. Its first rank receives the micro-batches."""
    replica_leaders: tuple[int, ...]
    """Global rank of each replica's first rank, by data-parallel index."""
    expert_rank: int = 0
    expert: int = 1
    """Number of ranks over which a layer's experts are spread: all or some of the context- and data-parallel ranks."""

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    def of_every_rank(self, value: Any) -> list[Any]:
        """Return all ranks' values, by rank; collective."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank; collective."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]


@dataclass(frozen=True, slots=True)
class SubWorld:
    """The first ``ranks`` processes of torchrun's world, as a world of their own."""

    ranks: int
    store: dist.Store
    name: str
    """The world's name, unique in the store."""


def start_process_group(timeout_s: float, sub_world: SubWorld | None = None) -> None:
    """Join the world that torchrun started. GPU tensors are sent over NCCL, CPU tensors over gloo.

    With CUDA, the rank first takes its GPU and the CPU cores near the GPU. A process that was started without torchrun
    is a world of one. With ``sub_world``, only the processes of ``sub_world`` join.

    Raises:
        UserError: no network interface of this host leads to the master (``choose_gloo_interface``).
    """
    if dist.is_initialized():
        return
    gc.collect()  # a policy of the last world holds its groups in reference cycles, and gloo keeps threads per group
    backend = "gloo"
    world: dict[str, Any] = {}
    if torch.cuda.is_available() and "RANK" in os.environ:
        index = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(index)
        card: Any = torch.cuda.get_device_properties(index)
        bind_near(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")
        backend = "cpu:gloo,cuda:nccl"
    if sub_world is not None:
        store = dist.PrefixStore(sub_world.name, sub_world.store)
        world = {"store": store, "rank": int(os.environ["RANK"]), "world_size": sub_world.ranks}
    else:
        # Rank 0 may read a checkpoint and start engines before it joins. A verb has its own deadline.
        timeout_s = max(timeout_s, _START_UP_S)
        if "RANK" not in os.environ:
            world = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    choose_gloo_interface()
    share_gloo_thread()
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), **world)


def build_mesh(config: ParallelConfig, seed: int, timeout_s: float = 1800.0) -> Mesh:
    """Divide the started world into Megatron's groups and seed each model-parallel rank.

    A collective of these groups that takes longer than ``timeout_s`` fails.

    Raises:
        ValueError: the number of processes that torchrun started is not ``parallel.ranks``.
    """
    world = dist.get_world_size()
    if world != config.ranks:
        raise ValueError(
            f"parallel.ranks is {config.ranks}, but torchrun started {world} processes; "
            f"start {config.ranks} (torchrun --nproc-per-node) or set parallel.ranks={world}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=config.tensor,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
            create_gloo_process_groups=False,  # only Megatron's own formats of optimizer checkpoints use them
        )
    model_parallel_cuda_manual_seed(seed)
    control, replica, leaders = _control_groups(timeout_s)
    return Mesh(
        rank=dist.get_rank(),
        world=world,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor=config.tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline=config.pipeline,
        context_rank=parallel_state.get_context_parallel_rank(),
        context=config.context,
        data_rank=parallel_state.get_data_parallel_rank(),
        data=config.data,
        control=control,
        replica=replica,
        replica_leaders=leaders,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert=config.expert,
    )


def _control_groups(timeout_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup, tuple[int, ...]]:
    """Return (group of all ranks, group of this rank's replica, every replica's first rank); the groups use gloo."""
    mine = parallel_state.get_data_parallel_rank()
    by_rank: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    timeout = datetime.timedelta(seconds=timeout_s)
    control = dist.new_group(backend="gloo", timeout=timeout)
    leaders = []
    for replica in range(max(by_rank) + 1):
        members = [rank for rank, index in enumerate(by_rank) if index == replica]
        leaders.append(members[0])
        group = dist.new_group(members, backend="gloo", timeout=timeout)
        if replica == mine:
            own = group
    return control, own, tuple(leaders)


def stop_process_group() -> None:
    """Leave the world, if this process has joined one."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
