"""Which backends and transports run where; what cannot run is refused before anything is started."""

from __future__ import annotations

from typing import Any

from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import Config

OURS = ("shard", "gloo")
VLLMS = ("nccl", "ipc", "sharded_rdt", "nccl_m2n")
_ON_CPU = ("gloo", "shared_memory", "gloo+shared_memory")


def check_choice(config: Config, cuda: bool) -> None:
    """Raise ConfigError if this machine, or the placement, cannot run what is asked for."""
    backend, transport = config.handoff.backend, config.handoff.transport
    colocated = config.rollout.placement == "colocated"
    if backend in VLLMS and not cuda:
        raise ConfigError(
            f"handoff.backend = {backend} is vLLM's and needs CUDA, which this machine does not have; "
            f"expected one of {', '.join(OURS)}"
        )
    if backend != "shard" and transport not in (None, "gloo"):
        raise ConfigError(f"handoff.transport = {transport} is for handoff.backend = shard; it is {backend}")
    if transport not in (None, *_ON_CPU) and not cuda:
        raise ConfigError(
            f"handoff.transport = {transport} needs CUDA, which this machine does not have; expected one of "
            f"{', '.join(_ON_CPU)}"
        )
    if cuda and colocated and (backend in ("nccl", "nccl_m2n") or transport == "nccl"):
        raise ConfigError(
            "NCCL refuses two ranks on one GPU, and with rollout.placement = colocated trainer and engines share them: "
            "expected handoff.backend = shard, without handoff.transport or with nccl+cuda_ipc"
        )
    if backend == "ipc" and not colocated:
        raise ConfigError("handoff.backend = ipc needs rollout.placement = colocated: memory is shared on one GPU")
    if backend == "nccl_m2n" and (config.parallel.pipeline > 1 or config.parallel.expert > 1):
        raise ConfigError(
            "handoff.backend = nccl_m2n knows one mesh of trainer ranks, all of which hold a part of every tensor: "
            f"expected parallel.pipeline = parallel.expert = 1, found {config.parallel.pipeline} and "
            f"{config.parallel.expert}"
        )


def worker_info(backend: str, info: dict[str, Any], engine_index: int, workers: int) -> dict[str, Any]:
    """Return what one engine's ``workers`` are told when they meet the trainer: ``info``, and which engine they are."""
    if backend in ("nccl", "nccl_m2n"):
        return {**info, "rank_offset": info["rank_offset"] + engine_index * workers}
    if backend == "sharded_rdt":
        return {**info, "replica_rank": engine_index, "num_replicas": info["num_consumers"] // workers}
    if backend == "ipc":
        return info
    return {**info, "engine_index": engine_index}
