"""Which transports run where; what cannot run is refused before anything is started."""

from __future__ import annotations

from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import Config

_ON_CPU = ("gloo", "shared_memory", "gloo+shared_memory")


def check_choice(config: Config, cuda: bool) -> None:
    """Raise ConfigError if this machine, or the placement, cannot run what is asked for."""
    backend, transport = config.handoff.backend, config.handoff.transport
    if backend != "shard" and transport not in (None, "gloo"):
        raise ConfigError(f"handoff.transport = {transport} is for handoff.backend = shard; it is {backend}")
    if transport not in (None, *_ON_CPU) and not cuda:
        raise ConfigError(
            f"handoff.transport = {transport} needs CUDA, which this machine does not have; expected one of "
            f"{', '.join(_ON_CPU)}"
        )
    if cuda and config.rollout.placement == "colocated" and transport == "nccl":
        raise ConfigError(
            "NCCL refuses two ranks on one GPU, and with rollout.placement = colocated trainer and engines share them: "
            "expected no handoff.transport, or nccl+cuda_ipc"
        )
