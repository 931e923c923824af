"""Process groups: who shares which part of the model and of the batch."""

from __future__ import annotations

import datetime
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from or1_megatron.config.schema import ParallelConfig


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place: its index and the size along each axis of parallelism."""

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
    """All ranks, over gloo: what is not tensors on the training device."""
    replica: dist.ProcessGroup
    """The ranks that share this rank's data-parallel index, over gloo; its first rank receives their micro-batches."""
    replica_leaders: tuple[int, ...]
    """Global rank of each replica's first rank, by data-parallel index."""
    expert_rank: int = 0
    expert: int = 1
    """Ranks over which a layer's experts are spread; they lie within the context- and data-parallel ranks."""

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1


@dataclass(frozen=True, slots=True)
class SubWorld:
    """The first ``ranks`` processes of torchrun's world, as a world of their own."""

    ranks: int
    store: dist.Store
    name: str
    """Of this one; used once per store."""


def start_process_group(timeout_s: float, sub_world: SubWorld | None = None) -> None:
    """Join the world that torchrun laid out: NCCL with CUDA (gloo beside it for CPU tensors), else gloo.

    A process started without torchrun is a world of one. A part of the world is joined by its own processes only.
    """
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    if sub_world is not None:
        rank, store = int(os.environ["RANK"]), dist.PrefixStore(sub_world.name, sub_world.store)
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=sub_world.ranks, timeout=timeout)
        return
    # Rank 0 may have a checkpoint to read and engines to start before it joins. What is inside a verb has a deadline.
    timeout = max(timeout, datetime.timedelta(hours=4))
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def build_mesh(config: ParallelConfig, seed: int, timeout_s: float = 1800.0) -> Mesh:
    """Cut the started world into Megatron's groups and seed each model-parallel rank.

    A collective of these groups that takes longer than ``timeout_s`` fails.

    Raises:
        ValueError: the number of processes is not the number of ranks that the config asks for.
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
            create_gloo_process_groups=True,
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
    """(all ranks, this rank's replica, every replica's first rank), over gloo."""
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
    """Leave the world; a no-op when it was never joined."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
