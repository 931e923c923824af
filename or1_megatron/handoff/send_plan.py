"""Plans a weight handoff: which trainer rank sends which tensor slices to which engine ranks, in which messages.

The plan is made once. Every rectangle that an engine rank wants is covered, exactly once, by rectangles that trainer
ranks hold. Where several ranks hold a rectangle, the rank with the least to send sends it. Engine ranks that want equal
slices (the n-th rank of each engine) form a group. A message has a bounded size, is packed once, and goes to each rank
of a group.

Engines on the trainer's GPUs are reached in two hops: first to the trainer rank on the engine rank's GPU (its
neighbour), then to the engine rank. NCCL refuses two ranks on one GPU, and CUDA IPC cannot leave a node, so there is no
other way between processes. Slices that the neighbour itself holds skip the first hop.

All messages have one order, in which every rank sends, passes on and receives. A round is one message from every rank
that sends to a group. No deadlock is possible: the first message that has not arrived waits only for earlier messages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from or1_megatron.handoff.failures import PlanImpossible
from or1_megatron.handoff.message.shipment import Group, Shipment
from or1_megatron.handoff.message.slices import Slice, plan_buckets
from or1_megatron.weights.holdings import Box, Holding, box_size, intersection, without

_SHARED_BYTES = 1 << 20  # a larger rectangle is divided among its holders


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """All messages of a handoff, in the order in which every rank handles them. Engine ranks follow trainer ranks."""

    trainers: int
    engines: int
    """Number of engine ranks."""
    shipments: tuple[Shipment, ...]

    def of(self, rank: int) -> HandoffPlan:
        """Return a plan with only the messages that ``rank`` packs, receives or passes on."""
        mine = [s for s in self.shipments if s.source == rank or s.parent(rank) is not None]
        return HandoffPlan(self.trainers, self.engines, tuple(mine))

    def bytes_sent(self) -> Counter[int]:
        """Return the bytes that each trainer rank sends in one handoff, including messages that it passes on."""
        sent = Counter[int]()
        for shipment in self.shipments:
            for rank in {shipment.source, shipment.via}:
                sent[rank] += shipment.size_bytes * len(shipment.children(rank))
        return sent

    def who(self, rank: int) -> str:
        """Return a rank's name for errors."""
        return f"trainer rank {rank}" if rank < self.trainers else f"engine rank {rank - self.trainers}"


def make_plan(
    holdings: Iterable[Holding],
    wants: Sequence[Sequence[Slice]],
    trainers: int,
    bucket_bytes: int,
    neighbours: Sequence[int] | None = None,
) -> HandoffPlan:
    """Return a plan for handoffs from ``trainers`` ranks to ``len(wants)`` engine ranks.

    Args:
        holdings: the rectangles that all trainer ranks hold, in the order of the model.
        wants: the slices that each engine rank wants.
        bucket_bytes: the bytes that a group receives in one round from all senders. A round is larger only where a row
            of a tensor, which is never cut, is larger than a trainer rank's equal share of these bytes.
        neighbours: for each engine rank, from 0, the trainer rank on its device; None: there is only one hop.

    Raises:
        PlanImpossible: no trainer rank holds a part of a wanted tensor.
    """
    held: dict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        held[holding.name].append(holding)
    near = {} if neighbours is None else {trainers + index: rank for index, rank in enumerate(neighbours)}
    wanted = _groups(wants, trainers, near)
    # A neighbour holds its own messages beside those that it passes on.
    share_bytes = max(1, bucket_bytes // (trainers if neighbours is None else trainers + 1))
    channels = _channels(held, wanted, trainers, share_bytes, near)
    senders = Counter(group for group, _ in channels)
    messages = [
        (index, group, source, slots)
        for (group, source), slices in channels.items()
        for index, slots in enumerate(
            plan_buckets(slices, max(share_bytes, bucket_bytes // senders[group] if neighbours is None else 0))
        )
    ]
    messages.sort(key=lambda message: message[:3])
    shipments = [
        Shipment(number, index, source, near.get(group[0], source), group, slots)
        for number, (index, group, source, slots) in enumerate(messages)
    ]
    return HandoffPlan(trainers, len(wants), tuple(shipments))


def _groups(wants: Sequence[Sequence[Slice]], trainers: int, near: Mapping[int, int]) -> dict[Group, frozenset[Slice]]:
    """Return the groups of engine ranks and the slices that each group wants; with neighbours, a group is one rank."""
    alike: dict[frozenset[Slice], list[int]] = defaultdict(list)
    for index, wanted in enumerate(wants):
        alike[frozenset(wanted)].append(trainers + index)
    if near:
        return {(rank,): wanted for wanted, ranks in alike.items() for rank in ranks}
    return {tuple(ranks): wanted for wanted, ranks in alike.items()}


def _channels(
    held: Mapping[str, Sequence[Holding]],
    wanted: Mapping[Group, frozenset[Slice]],
    trainers: int,
    message_bytes: int,
    near: Mapping[int, int],
) -> dict[tuple[Group, int], list[Slice]]:
    """Return the slices that each trainer rank sends to each group, in the order of the model."""
    order = {name: index for index, name in enumerate(held)}
    asked = [(want, group) for group, wants in wanted.items() for want in wants]
    for want, _ in asked:
        if want.name not in order:
            raise PlanImpossible(f"handoff: engines want {want.name}, of which no trainer rank holds anything")
    burden = [0] * trainers
    channels: dict[tuple[Group, int], list[Slice]] = defaultdict(list)
    covered: dict[Slice, list[tuple[Box, tuple[int, ...]]]] = {}
    for want, group in sorted(asked, key=lambda pair: (order[pair[0].name], pair[0].box, pair[1])):
        if want not in covered:
            covered = {want: _cover(want, held[want.name])}  # equal wants follow each other
        for box, holders in covered[want]:
            neighbour = near.get(group[0])
            candidates = (neighbour,) if neighbour in holders else holders
            for piece in _divide(box, len(candidates), want.dtype.itemsize, message_bytes):
                part = Slice(want.name, piece, want.dtype)
                source = min(candidates, key=lambda holder: (burden[holder], holder))
                burden[source] += part.size_bytes
                channels[group, source].append(part)
    return channels


def _cover(want: Slice, held: Sequence[Holding]) -> list[tuple[Box, tuple[int, ...]]]:
    """Return rectangles that together cover the slice ``want``, each with the trainer ranks that hold it."""
    covered: list[tuple[Box, tuple[int, ...]]] = []
    open_boxes = [want.box]
    for holding in held:
        left: list[Box] = []
        for box in open_boxes:
            shared = intersection(box, holding.box)
            if shared is None:
                left.append(box)
            else:
                covered.append((shared, holding.ranks))
                left += without(box, shared)
        open_boxes = left
    if open_boxes:
        raise PlanImpossible(f"handoff: no trainer rank holds '{want.name}' at {open_boxes[0]}, which an engine wants")
    return covered


def _divide(box: Box, holders: int, itemsize: int, message_bytes: int) -> list[Box]:
    """Return parts of a rectangle, cut along axis 0 to at most ``message_bytes``; a large one has a part per holder."""
    size_bytes = box_size(box) * itemsize
    parts = max(math.ceil(size_bytes / message_bytes), holders if size_bytes > _SHARED_BYTES else 1)
    if parts == 1 or not box:
        return [box]
    (start, stop), rest = box[0], box[1:]
    row_bytes = size_bytes // (stop - start)
    rows = max(1, min(math.ceil((stop - start) / parts), message_bytes // row_bytes))
    return [((low, min(low + rows, stop)), *rest) for low in range(start, stop, rows)]
