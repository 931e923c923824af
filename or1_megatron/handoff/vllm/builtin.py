"""vLLM's own weight-transfer backends, driven through its trainer factory on every trainer rank. GPUs only.

Not run on a GPU so far; sources and init infos pass vLLM's checks on CPU.
"""

from __future__ import annotations

import math
import socket
from typing import Any

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.errors import failing_together
from or1_megatron.handoff.vllm.sources import EverywhereSource, HeldSource, MeshSource, ShardsSource
from or1_megatron.interfaces import EngineControl, PolicyWeights


class NoClient:
    """Stands in for the engines on ranks other than 0, which never call them."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"weight transfer: trainer ranks other than 0 do not {name}")


class BuiltinTrainer:
    """``sender.WeightSender`` over vLLM's trainer engine."""

    def __init__(self, weights: PolicyWeights, rank: int, config: HandoffConfig, engines: EngineControl | None) -> None:
        """``engines``: on rank 0 only."""
        self._weights, self._rank, self._backend, self._engines = weights, rank, config.backend, engines
        self._trainer: TrainerWeightTransferEngine[Any] | None = None

    def send(self, version: int) -> int:
        with failing_together(self._weights, self.close):
            if self._engines is not None:
                self._engines.next_version = version
            self._trainer = self._trainer or self._connect()
            self._trainer.send_weights()
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self._weights.metadata())

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.shutdown()
        self._trainer = None

    def _connect(self) -> TrainerWeightTransferEngine[Any]:
        """Meet the engines; collective over the trainer's ranks."""
        engines, place = self._engines, None
        if engines is not None:
            place = (engines.address, _free_port(), engines.engines, engines.workers_per_engine)
        info = init_info(self._backend, self._rank, self._weights.ranks, self._weights.from_rank_0(place))
        source = source_for(self._backend, self._weights, self._rank)
        return WeightTransferTrainerFactory.trainer_init(info, client=engines or NoClient(), source=source)


def source_for(backend: str, weights: PolicyWeights, rank: int) -> WeightSource:
    if backend == "nccl":
        return ShardsSource(weights, sends=rank == 0)
    if backend == "ipc":
        return EverywhereSource(weights)
    if backend == "sharded_rdt":
        return HeldSource(weights)
    return MeshSource(weights, rank)


def init_info(backend: str, rank: int, trainers: int, place: tuple[str, int, int, int]) -> TrainerInitInfo:
    """Return a trainer rank's settings. ``place``: (rank 0's address, a free port there, engines, workers of each)."""
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
