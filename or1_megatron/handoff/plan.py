"""Who sends what to whom: what the engines' loaders ask for, composed with how the trainer has cut it. Pure.

Made once. Every rectangle that an engine rank wants is covered, exactly once, by rectangles that trainer ranks hold;
where several ranks hold one, the least burdened sends. What goes from one rank to another travels in buckets, and all
buckets of a handoff have one order, in which every sender sends and every receiver receives: so nobody can wait for
somebody who waits for him.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from or1_megatron.handoff.buckets import Bucket, plan_buckets
from or1_megatron.weights.holdings import Box, Holding, box_shape, box_size, intersection, without

_SHARED_BYTES = 1 << 20  # what is larger is divided among all that hold it


@dataclass(frozen=True, slots=True)
class Want:
    """A rectangle of an HF tensor that an engine rank's parameters take up."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of an HF tensor on the wire."""

    name: str
    box: Box
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)

    @property
    def size_bytes(self) -> int:
        return box_size(self.box) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"'{self.name}'[{', '.join(f'{start}:{stop}' for start, stop in self.box)}]"


@dataclass(frozen=True, slots=True)
class Shipment:
    """The ``number``-th bucket from a trainer rank to an engine rank."""

    source: int
    destination: int
    number: int
    bucket: Bucket[Slice]


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """All shipments, in the order in which everyone works through them. Trainer ranks come first, then engine ranks."""

    trainers: int
    shipments: tuple[Shipment, ...]

    def sent_by(self, rank: int) -> list[Shipment]:
        return [shipment for shipment in self.shipments if shipment.source == rank]

    def received_by(self, rank: int) -> list[Shipment]:
        return [shipment for shipment in self.shipments if shipment.destination == rank]

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes of weights by (source, destination)."""
        total: dict[tuple[int, int], int] = defaultdict(int)
        for shipment in self.shipments:
            for slot in shipment.bucket.slots:
                total[shipment.source, shipment.destination] += slot.spec.size_bytes
        return dict(total)


class PlanImpossible(ValueError):
    """No trainer rank holds what an engine rank wants."""


def make_plan(
    holdings: Iterable[Holding],
    dtypes: Mapping[str, torch.dtype],
    wants: Sequence[Sequence[Want]],
    trainers: int,
    bucket_bytes: int,
) -> HandoffPlan:
    """Plan a handoff from ``trainers`` ranks to ``len(wants)`` engine ranks.

    Args:
        holdings: of all trainer ranks, in the order of the model.
        dtypes: of each tensor, as held and sent.
        wants: of each engine rank.

    Raises:
        PlanImpossible: a part of a wanted tensor is held by nobody.
    """
    held: dict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        held[holding.name].append(holding)
    order = {name: index for index, name in enumerate(held)}
    burden = [0] * trainers
    channels: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    asked = [(order.get(want.name, -1), want.box, rank) for rank, wanted in enumerate(wants) for want in set(wanted)]
    names = list(held)
    missing = {want.name for wanted in wants for want in wanted} - held.keys()
    if missing:
        raise PlanImpossible(f"handoff: engines want {sorted(missing)[0]}, of which no trainer rank holds anything")
    for index, box, rank in sorted(asked):
        name = names[index]
        for part, holders in _cover(Want(name, box), held[name]):
            for piece in _divide(part, len(holders), dtypes[name].itemsize, bucket_bytes):
                cut = Slice(name, piece, dtypes[name])
                source = min(holders, key=lambda holder: (burden[holder], holder))
                burden[source] += cut.size_bytes
                channels[source, trainers + rank].append(cut)
    shipments = [
        Shipment(source, destination, number, bucket)
        for (source, destination), slices in channels.items()
        for number, bucket in enumerate(plan_buckets(slices, bucket_bytes))
    ]
    shipments.sort(key=lambda shipment: (shipment.number, shipment.source, shipment.destination))
    return HandoffPlan(trainers, tuple(shipments))


def _cover(want: Want, held: Sequence[Holding]) -> list[tuple[Box, tuple[int, ...]]]:
    """Rectangles that together are what is wanted, each with the ranks that hold it."""
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


def _divide(box: Box, holders: int, itemsize: int, bucket_bytes: int) -> list[Box]:
    """A rectangle in parts along axis 0: none above ``bucket_bytes`` if rows allow, large ones one for each holder."""
    size_bytes = box_size(box) * itemsize
    parts = max(math.ceil(size_bytes / bucket_bytes), holders if size_bytes > _SHARED_BYTES else 1)
    if parts == 1 or not box:
        return [box]
    (start, stop), rest = box[0], box[1:]
    rows = math.ceil((stop - start) / parts)
    return [((low, min(low + rows, stop)), *rest) for low in range(start, stop, rows)]
