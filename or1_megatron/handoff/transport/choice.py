"""Chooses the transport of handoffs by the ranks' locations, or checks the configured one; limits a round's bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import HOST_ROUND_BYTES, Config
from or1_megatron.handoff.failures import HandoffError
from or1_megatron.handoff.transport.links import Location

_ON_ONE_NODE = ("shared_memory", "cuda_ipc")
_THROUGH_HOST_MEMORY = ("gloo", "shared_memory", "gloo+shared_memory")


def check_transport(config: Config, cuda: bool) -> None:
    """Raise ConfigError if this machine, or the placement, cannot run ``handoff.transport``."""
    transport = config.handoff.transport
    if transport not in (None, *_THROUGH_HOST_MEMORY) and not cuda:
        raise ConfigError(
            f"handoff.transport = {transport} needs CUDA, which this machine does not have; expected one of "
            f"{', '.join(_THROUGH_HOST_MEMORY)}"
        )
    if cuda and config.rollout.placement == "colocated" and transport == "nccl":
        raise ConfigError(
            "NCCL refuses two ranks on one GPU, and with rollout.placement = colocated trainer and engines share them: "
            "expected no handoff.transport, or nccl+cuda_ipc"
        )


def choose_transport(trainers: Sequence[Location], engines: Sequence[Location]) -> str:
    """Return the transport that suits the ranks' locations, for an unset ``handoff.transport``."""
    if trainers[0].device:
        return "nccl+cuda_ipc" if set(trainers) & set(engines) else "nccl"
    one_node = len({location.node for location in (*trainers, *engines)}) == 1
    return "shared_memory" if one_node else "gloo"


def round_bytes(transport: str, bucket_bytes: int) -> int:
    """Return the bytes that an engine rank receives in one round.

    Rounds through host memory are small. Small messages touch fewer new pages in a handoff, are still in the
    processor's cache when they are loaded, and let the receivers begin sooner.
    """
    return min(bucket_bytes, HOST_ROUND_BYTES) if transport in _THROUGH_HOST_MEMORY else bucket_bytes


def neighbours_of(transport: str, trainers: Sequence[Location], engines: Sequence[Location]) -> list[int] | None:
    """Return, for each engine rank, the trainer rank on the same device, which passes messages on to the engine rank.

    On CPU the trainer ranks of the engine rank's node are used in turn. Returns None if the transport has one hop.

    Raises:
        HandoffError: the transport cannot connect the ranks where they run.
    """
    if transport in _ON_ONE_NODE:
        here = trainers[0].node
        for who, locations in (("trainer", trainers), ("engine", engines)):
            for rank, location in enumerate(locations):
                if location.node != here:
                    raise HandoffError(
                        f"handoff.transport = {transport} needs all ranks on one node and in one PID namespace; {who} "
                        f"rank {rank} is not where trainer rank 0 is"
                    )
    if transport == "nccl" and {location for location in trainers if location.device} & set(engines):
        raise HandoffError(
            "handoff.transport = nccl: engines share the trainer's GPUs, and NCCL refuses two ranks on one; "
            "nccl+cuda_ipc is for that"
        )
    if "+" not in transport:
        return None
    ranks: dict[Location, list[int]] = defaultdict(list)
    for rank, location in enumerate(trainers):
        ranks[location].append(rank)
    used = defaultdict[Location, int](int)
    neighbours = []
    for index, location in enumerate(engines):
        if location not in ranks:
            raise HandoffError(
                f"handoff.transport = {transport} needs a trainer rank on each engine rank's device; engine rank "
                f"{index} has none beside it"
            )
        neighbours.append(ranks[location][used[location] % len(ranks[location])])
        used[location] += 1
    return neighbours
