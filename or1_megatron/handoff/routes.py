"""Over which transport, and over which hops, a message reaches the engine ranks that it is for. Ranks are numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import HOST_ROUND_BYTES, Config
from or1_megatron.handoff.failures import HandoffError
from or1_megatron.handoff.message.shipment import Hop
from or1_megatron.handoff.transport.links import Location

_ON_ONE_NODE = ("shared_memory", "cuda_ipc")
_THROUGH_HOST_MEMORY = ("gloo", "shared_memory", "gloo+shared_memory")
_TOLERATED = 1.1  # how much longer trainers may send than an engine rank receives, before engines pass on


class Routes:
    """Trees from the ranks that pack to the ranks that load.

    These are straight, from the rank that packs to each that loads: where memory is shared, no link is a limit.
    """

    def groups(self, alike: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Divide engine ranks that want the same into the groups for which a message is packed once."""
        return [alike]

    def candidates(self, holders: tuple[int, ...], group: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the trainer ranks that hold something which may send it to the group."""
        return holders

    def tree(self, source: int, group: tuple[int, ...], shard_share: float) -> tuple[Hop, ...]:
        """Return the hops to all of a group; each comes after the hop by which the message reaches its sender.

        Args:
            shard_share: bytes of an engine rank's shard, as a multiple of what a trainer rank packs.
        """
        return tuple((source, member) for member in group)

    def message_bytes(self, bucket_bytes: int, senders: int, trainers: int) -> int:
        """Return what each of a group's ``senders`` may send in a round, which is a bucket at most."""
        return max(1, bucket_bytes // senders)


class Relayed(Routes):
    """Straight while the trainers' links can carry it; else some ranks of a group receive it and pass it on.

    An engine rank has to receive its shard in any case. So trainers send to ``k`` ranks of a group, with k = shard /
    packed, which takes them hardly longer than that. The others follow in ``k`` chains, in which every rank passes on
    what it receives, once, while the next message comes in.
    """

    def tree(self, source: int, group: tuple[int, ...], shard_share: float) -> tuple[Hop, ...]:
        heads = min(len(group), max(1, int(_TOLERATED * shard_share)))
        return tuple((source if index < heads else group[index - heads], member) for index, member in enumerate(group))


class TwoHops(Routes):
    """Engines on the trainer's devices: to the trainer rank that shares the engine rank's device, then across to it.

    NCCL refuses two ranks on one device, and CUDA IPC cannot leave a node, so there is no other way between processes.
    What the neighbour itself holds does not travel.
    """

    def __init__(self, neighbours: Sequence[int], trainers: int) -> None:
        """``neighbours``: for each engine rank, from 0, the trainer rank on its device."""
        self._neighbour = {trainers + index: rank for index, rank in enumerate(neighbours)}

    def groups(self, alike: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(member,) for member in alike]

    def candidates(self, holders: tuple[int, ...], group: tuple[int, ...]) -> tuple[int, ...]:
        near = self._neighbour[group[0]]
        return (near,) if near in holders else holders

    def tree(self, source: int, group: tuple[int, ...], shard_share: float) -> tuple[Hop, ...]:
        (member,) = group
        near = self._neighbour[member]
        return ((near, member),) if source == near else ((source, near), (near, member))

    def message_bytes(self, bucket_bytes: int, senders: int, trainers: int) -> int:
        return max(1, bucket_bytes // (trainers + 1))  # a rank holds its own messages beside those that it passes on


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
    """Return the transport for where the ranks run, when ``handoff.transport`` names none."""
    if trainers[0].device:
        return "nccl+cuda_ipc" if set(trainers) & set(engines) else "nccl"
    one_node = len({location.node for location in (*trainers, *engines)}) == 1
    return "shared_memory" if one_node else "gloo"


def round_bytes(transport: str, bucket_bytes: int) -> int:
    """Return what an engine rank receives in one round.

    Through host memory it is little: of small messages fewer pages are touched for the first time in a handoff, what is
    packed is still in the processor's cache when it is loaded, and the receivers begin sooner.
    """
    return min(bucket_bytes, HOST_ROUND_BYTES) if transport in _THROUGH_HOST_MEMORY else bucket_bytes


def routes_for(transport: str, trainers: Sequence[Location], engines: Sequence[Location]) -> Routes:
    """Return the routes of a transport.

    Raises:
        HandoffError: the ranks do not run where the transport needs them.
    """
    if "+" in transport:
        return TwoHops(_neighbours(transport, trainers, engines), len(trainers))
    if transport in _ON_ONE_NODE:
        here = trainers[0].node
        for who, locations in (("trainer", trainers), ("engine", engines)):
            for rank, location in enumerate(locations):
                if location.node != here:
                    raise HandoffError(
                        f"handoff.transport = {transport} needs all ranks on one node and in one PID namespace; {who} "
                        f"rank {rank} is not where trainer rank 0 is"
                    )
        return Routes()
    shared = {location for location in trainers if location.device} & set(engines)
    if transport == "nccl" and shared:
        raise HandoffError(
            "handoff.transport = nccl: engines share the trainer's GPUs, and NCCL refuses two ranks on one; "
            "nccl+cuda_ipc is for that"
        )
    return Relayed()


def _neighbours(transport: str, trainers: Sequence[Location], engines: Sequence[Location]) -> list[int]:
    """Return, for each engine rank, the trainer rank on its device; without devices those of its node in turn."""
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
