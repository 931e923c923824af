"""Who sends what to whom: what the engines' loaders ask for, composed with how the trainer has cut it. Pure.

The plan is made once. Every rectangle that an engine rank wants is covered, exactly once, by rectangles that trainer
ranks hold; where several ranks hold one, the least burdened sends it. Engine ranks that want the same (the n-th of each
engine) form a group: their messages are packed once and are of bounded size. ``routes`` says over which hops a message
reaches all of its group.

All messages have one order, in which every rank sends, passes on and receives; a round is one message from every rank
that has something for a group. No two ranks can wait for each other: the first message in the order that has not
arrived waits only for messages before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from or1_megatron.handoff.errors import PlanImpossible
from or1_megatron.handoff.message.buckets import ALIGNMENT_BYTES, Slice, plan_buckets
from or1_megatron.handoff.message.message import Group, Hop, Shipment
from or1_megatron.handoff.shard.routes import Load, Routes
from or1_megatron.weights.holdings import Box, Holding, box_size, intersection, without

_SHARED_BYTES = 1 << 20  # what is larger is divided among all that hold it


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """All messages, in the order in which every rank works through them. Ranks: the trainer's, then the engines'."""

    trainers: int
    engines: int
    """Engine ranks."""
    shipments: tuple[Shipment, ...]

    def sent_by(self, rank: int) -> list[Shipment]:
        """Return the messages that ``rank`` packs."""
        return [shipment for shipment in self.shipments if shipment.source == rank]

    def through(self, rank: int) -> list[Shipment]:
        """Return the messages that ``rank`` receives, to keep or to pass on."""
        return [shipment for shipment in self.shipments if shipment.parent(rank) is not None]

    def of(self, rank: int) -> HandoffPlan:
        """Return the part of the plan that ``rank`` takes part in."""
        mine = [s for s in self.shipments if s.source == rank or s.parent(rank) is not None]
        return HandoffPlan(self.trainers, self.engines, tuple(mine))

    def who(self, rank: int) -> str:
        """Return a rank's name for errors."""
        return f"trainer rank {rank}" if rank < self.trainers else f"engine rank {rank - self.trainers}"

    def link_bytes(self) -> dict[Hop, int]:
        """Return the bytes of weights by (from, to), including those that are passed on."""
        total: dict[Hop, int] = defaultdict(int)
        for shipment in self.shipments:
            size = sum(slot.slice.size_bytes for slot in shipment.slots)
            for hop in shipment.hops:
                total[hop] += size
        return dict(total)


def make_plan(
    holdings: Iterable[Holding],
    wants: Sequence[Sequence[Slice]],
    trainers: int,
    bucket_bytes: int,
    routes: Routes | None = None,
) -> HandoffPlan:
    """Plan a handoff from ``trainers`` ranks to ``len(wants)`` engine ranks.

    Args:
        holdings: all trainer ranks', in the order of the model.
        wants: each engine rank's.
        bucket_bytes: what a group receives in one round, from all ranks that send to it (more only where a row of a
            tensor, which is not cut, is larger than a trainer rank's equal share of it).
        routes: by default straight from the rank that packs to those that load.

    Raises:
        PlanImpossible: no trainer rank holds some part of a wanted tensor.
    """
    routes = Routes() if routes is None else routes
    held: dict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        held[holding.name].append(holding)
    wanted = _groups(wants, trainers, routes)
    share, most = (max(1, limit) for limit in routes.message_limits(bucket_bytes, trainers))
    channels = _channels(held, wanted, trainers, share, routes)
    load = _load(channels)
    limits = _limits(channels, bucket_bytes, share, most)
    messages = [
        (index, group, source, slots)
        for (group, source), slices in channels.items()
        for index, slots in enumerate(plan_buckets(slices, limits[group, source]))
    ]
    messages.sort(key=lambda message: message[:3])
    shipments = [
        Shipment(number, index, source, group, routes.tree(source, group, load), slots)
        for number, (index, group, source, slots) in enumerate(messages)
    ]
    return HandoffPlan(trainers, len(wants), tuple(shipments))


def _groups(wants: Sequence[Sequence[Slice]], trainers: int, routes: Routes) -> dict[Group, frozenset[Slice]]:
    """Return the groups of engine ranks, with what the ranks of each want."""
    alike: dict[frozenset[Slice], list[int]] = defaultdict(list)
    for index, wanted in enumerate(wants):
        alike[frozenset(wanted)].append(trainers + index)
    return {group: wanted for wanted, ranks in alike.items() for group in routes.groups(tuple(ranks))}


def _channels(
    held: Mapping[str, Sequence[Holding]],
    wanted: Mapping[Group, frozenset[Slice]],
    trainers: int,
    message_bytes: int,
    routes: Routes,
) -> dict[tuple[Group, int], list[Slice]]:
    """Return what each trainer rank sends to each group, in the order of the model."""
    order = {name: index for index, name in enumerate(held)}
    for want in (want for each in wanted.values() for want in each):
        if want.name not in order:
            raise PlanImpossible(f"handoff: engines want {want.name}, of which no trainer rank holds anything")
    burden = [0] * trainers
    channels: dict[tuple[Group, int], list[Slice]] = defaultdict(list)
    covered: dict[Slice, list[tuple[Box, tuple[int, ...]]]] = {}
    asked = [(want, group) for group, each in wanted.items() for want in each]
    for want, group in sorted(asked, key=lambda pair: (order[pair[0].name], pair[0].box, pair[1])):
        if want not in covered:
            covered = {want: _cover(want, held[want.name])}  # the next to ask wants the same, if anyone does
        for box, holders in covered[want]:
            near = routes.candidates(holders, group)
            for piece in _divide(box, len(near), want.dtype.itemsize, message_bytes):
                part = Slice(want.name, piece, want.dtype)
                source = min(near, key=lambda holder: (burden[holder], holder))
                burden[source] += part.size_bytes
                channels[group, source].append(part)
    return channels


def _limits(
    channels: Mapping[tuple[Group, int], Sequence[Slice]], bucket_bytes: int, share: int, most: int
) -> dict[tuple[Group, int], int]:
    """Return the bytes of each channel's messages. Channels that need less than a ``share`` leave the rest to others.

    So there are fewer rounds where an engine rank receives little from most senders. Each round costs a wait and a walk
    through vLLM's modules.
    """
    senders: dict[Group, list[tuple[int, int]]] = defaultdict(list)
    for (group, source), slices in channels.items():
        senders[group].append((source, sum(each.size_bytes + ALIGNMENT_BYTES for each in slices)))
    found = {}
    for group, sizes in senders.items():
        little = [size for _, size in sizes if size <= share]
        large = (bucket_bytes - sum(little)) // max(1, len(sizes) - len(little))
        for source, size in sizes:
            found[group, source] = share if size <= share else max(share, min(most, large))
    return found


def _load(channels: Mapping[tuple[Group, int], Sequence[Slice]]) -> Load:
    packed, shards = defaultdict[int, int](int), defaultdict[Group, int](int)
    for (group, source), slices in channels.items():
        size = sum(each.size_bytes for each in slices)
        packed[source] += size
        shards[group] += size
    return Load(max(packed.values(), default=0), max(shards.values(), default=0))


def _cover(want: Slice, held: Sequence[Holding]) -> list[tuple[Box, tuple[int, ...]]]:
    """Return rectangles that together make up what is wanted, each with the ranks that hold it."""
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
    """Divide a rectangle along axis 0: no part above ``message_bytes`` if rows allow, and a large one among holders."""
    size_bytes = box_size(box) * itemsize
    parts = max(math.ceil(size_bytes / message_bytes), holders if size_bytes > _SHARED_BYTES else 1)
    if parts == 1 or not box:
        return [box]
    (start, stop), rest = box[0], box[1:]
    row_bytes = size_bytes // (stop - start)
    rows = max(1, min(math.ceil((stop - start) / parts), message_bytes // row_bytes))
    return [((low, min(low + rows, stop)), *rest) for low in range(start, stop, rows)]
