"""vLLM's own weight-transfer backends, driven through its trainer factory on every trainer rank. GPUs only.

Not run so far, for want of GPUs; sources and init infos pass vLLM's checks on CPU.
"""

from __future__ import annotations

import socket
from typing import Any

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.vllm.sources import EverywhereSource, HeldSource, MeshSource, ShardsSource
from or1_megatron.interfaces import PolicyWeights


class NoClient:
    """The engines' place on ranks other than 0, which never speak to them."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"weight transfer: trainer ranks other than 0 do not {name}")


def open_builtin(
    config: HandoffConfig, weights: PolicyWeights, rank: int, client: Any
) -> TrainerWeightTransferEngine[Any]:
    """Meet the engines; collective over the trainer's ranks.

    Args:
        client: ``EngineControl`` on rank 0; None elsewhere.
    """
    place = None
    if client is not None:
        place = (client.address, _free_port(), client.engines, client.workers_per_engine)
    place = weights.from_rank_0(place)
    source = source_for(config.backend, weights, rank)
    info = init_info(config.backend, rank, weights.ranks, place)
    return WeightTransferTrainerFactory.trainer_init(info, client=client or NoClient(), source=source)


def source_for(backend: str, weights: PolicyWeights, rank: int) -> WeightSource:
    if backend == "nccl":
        return ShardsSource(weights, sends=rank == 0)
    if backend == "ipc":
        return EverywhereSource(weights)
    if backend == "sharded_rdt":
        return HeldSource(weights)
    return MeshSource(weights, rank)


def init_info(backend: str, rank: int, trainers: int, place: tuple[str, int, int, int]) -> TrainerInitInfo:
    """``place``: (rank 0's address, a free port there, engines, workers per engine)."""
    address, port, engines, workers = place
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=rank, master_address=address, master_port=port, world_size=1 + engines * workers
        )
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True)
    if backend == "sharded_rdt":
        from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

        return ShardedRDTTrainerInitInfo(rank=rank, num_consumers=engines * workers, workers_per_replica=workers)
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

    return M2NTrainerInitInfo(
        rank=rank,
        master_address=address,
        master_port=port,
        world_size=trainers + engines * workers,
        num_trainer_ranks=trainers,
        dst_mesh_dims=(engines, workers),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
