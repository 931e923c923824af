"""Plans a weight handoff: which trainer rank sends which tensor slices to which engine ranks, in which messages.

The plan is made once. Every rectangle that an engine rank wants is covered, exactly once, by rectangles that trainer
ranks hold. Where several ranks hold a rectangle, the rank with the least to send sends it. Engine ranks that want equal
slices (the n-th rank of each engine) form a group. A message has a bounded size. It is packed once and sent to each
rank of a group.

Engines on the trainer's GPUs are reached in two hops: first to the trainer rank on the engine rank's GPU (its
neighbour), then to the engine rank. NCCL refuses two ranks on one GPU, and CUDA IPC cannot leave a node, so there is no
other way between processes. If the neighbour itself holds a slice, the first hop is left out.

All messages have one order, in which every rank sends, passes on and receives. A round is one message from every rank
that sends to a group. No deadlock is possible: the first message that has not arrived waits only for earlier messages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from or1_megatron.handoff.failures import PlanImpossible
from or1_megatron.handoff.message.shipment import Group, Shipment
from or1_megatron.handoff.message.slices import Slice, plan_buckets
from or1_megatron.weights.holdings import Box, Holding, box_size, intersection, without

Part = tuple[Box, tuple[int, ...]]
"""A rectangle of a tensor and the trainer ranks that hold it."""

_SHARED_BYTES = 1 << 20  # a larger rectangle is divided among its holders


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """All messages of a handoff, in the order in which all ranks handle them. Engine ranks come after trainer ranks."""

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
        bucket_bytes: the most bytes that a group receives in one round from all senders together
            (``transport.choice.round_bytes``). Rows are never cut: a row that is larger than its sender's equal share
            of these bytes makes the round larger.
        neighbours: entry i is the trainer rank on the device of engine rank i. None: there is only one hop.

    Raises:
        PlanImpossible: an engine rank wants a part of a tensor that no trainer rank holds.
    """
    held: dict[str, tuple[Part, ...]] = {}
    for holding in holdings:
        held[holding.name] = (*held.get(holding.name, ()), (holding.box, holding.ranks))
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
    """Return the slices that each group of engine ranks wants. If there are neighbours, each group has one rank."""
    alike: dict[frozenset[Slice], list[int]] = defaultdict(list)
    for index, wanted in enumerate(wants):
        alike[frozenset(wanted)].append(trainers + index)
    if near:
        return {(rank,): wanted for wanted, ranks in alike.items() for rank in ranks}
    return {tuple(ranks): wanted for wanted, ranks in alike.items()}


def _channels(
    held: Mapping[str, tuple[Part, ...]],
    wanted: Mapping[Group, frozenset[Slice]],
    trainers: int,
    message_bytes: int,
    near: Mapping[int, int],
) -> dict[tuple[Group, int], list[Slice]]:
    """Return the slices that each trainer rank sends to each group, in the order of the model."""
    asked: dict[str, list[tuple[Box, Group, Slice]]] = {name: [] for name in held}
    for group, wants in wanted.items():
        for want in wants:
            if want.name not in asked:
                raise PlanImpossible(f"handoff: engines want {want.name}, of which no trainer rank holds anything")
            asked[want.name].append((want.box, group, want))
    burden = [0] * trainers
    channels: dict[tuple[Group, int], list[Slice]] = defaultdict(list)
    for name, of_tensor in asked.items():
        for whole, group, want in sorted(of_tensor, key=lambda one: one[:2]):
            for box, holders in _cover(whole, held[name]):
                if not holders:
                    raise PlanImpossible(f"handoff: no trainer rank holds '{name}' at {box}, which an engine wants")
                neighbour = near.get(group[0])
                candidates = (neighbour,) if neighbour in holders else holders
                for piece, size_bytes in _divide(box, len(candidates), want.dtype.itemsize, message_bytes):
                    source = min(candidates, key=lambda holder: (burden[holder], holder))
                    burden[source] += size_bytes
                    channels[group, source].append(want if piece == whole else Slice(name, piece, want.dtype))
    return channels


@lru_cache(1 << 14)  # layers and experts are alike
def _cover(want: Box, held: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return rectangles that together cover ``want``, each with its holders. Rectangles without a holder come last."""
    covered: list[Part] = []
    open_boxes = [want]
    for held_box, ranks in held:
        left: list[Box] = []
        for box in open_boxes:
            shared = intersection(box, held_box)
            if shared is None:
                left.append(box)
            else:
                covered.append((shared, ranks))
                left += without(box, shared)
        open_boxes = left
    return *covered, *((box, ()) for box in open_boxes)


@lru_cache(1 << 14)
def _divide(box: Box, holders: int, itemsize: int, message_bytes: int) -> tuple[tuple[Box, int], ...]:
    """Cut a rectangle into groups of rows, and return each part with its bytes.

    A part has at most ``message_bytes``, unless it is a single row. If the rectangle has more than ``_SHARED_BYTES``,
    there are about ``holders`` parts, or more.
    """
    size_bytes = box_size(box) * itemsize
    parts = max(math.ceil(size_bytes / message_bytes), holders if size_bytes > _SHARED_BYTES else 1)
    if parts == 1 or not box:
        return ((box, size_bytes),)
    (start, stop), rest = box[0], box[1:]
    row_bytes = size_bytes // (stop - start)
    rows = max(1, min(math.ceil((stop - start) / parts), message_bytes // row_bytes))
    cuts = [*range(start, stop, rows), stop]
    return tuple((((low, high), *rest), (high - low) * row_bytes) for low, high in pairwise(cuts))
