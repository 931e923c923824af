"""A rank's part in a handoff: it packs and sends its own, takes in what comes, and passes on what goes further."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from or1_megatron.handoff.message.message import message_bytes, pack
from or1_megatron.handoff.shard.plan import HandoffPlan, Shipment
from or1_megatron.handoff.transport.base import Arrival, BufferPool
from or1_megatron.handoff.transport.links import Links
from or1_megatron.handoff.transport.status_store import StatusStore, in_background
from or1_megatron.weights.holdings import Box

_BUFFERS = 2  # one is packed while the other travels or is read
_ROUNDS_AHEAD = 1  # receives of the next round are under way while this one is loaded


@dataclass
class TransferStats:
    """What a rank counted in one handoff."""

    bytes_sent: int = 0
    """By its transports, passed on ones included."""
    bytes_received: int = 0
    checksums: dict[int, int] = field(default_factory=dict)
    """By engine rank (numbered after the trainer's), sums of the checksums of the slices for it or received by it."""


def ship(
    plan: HandoffPlan,
    rank: int,
    links: Links,
    status: StatusStore,
    read: Callable[[str, Box], Tensor],
    handoff: int,
    watched: Future[Any] | None = None,
) -> TransferStats:
    """Pack and send what trainer rank ``rank`` has to, and pass on what goes through it.

    Args:
        read: a rectangle of a tensor that this rank holds.
        watched: a failure of this ends the waits.

    Raises:
        HandoffError: somebody failed, or did not keep up.
    """
    before = links.counts()
    links.begin(plan.shipments, rank)  # two threads start messages
    passing = in_background(lambda: _pass_on(plan, rank, links, status)) if plan.through(rank) else None
    pools: dict[int, BufferPool] = {id(link): BufferPool(link.allocate) for link in links.all}
    travelling: deque[tuple[Shipment, Tensor, list[Future[None]]]] = deque()
    sums: dict[int, int] = {}

    def pool(shipment: Shipment) -> BufferPool:
        return pools[id(links.over(rank, shipment.children(rank)[0]))]

    def land() -> None:
        shipment, buffer, futures = travelling.popleft()
        for future, child in zip(futures, shipment.children(rank), strict=True):
            status.wait(future, f"{plan.who(child)} to take {shipment.bucket.slots[-1].spec}", watched)
        pool(shipment).give(buffer)

    mine = plan.sent_by(rank)
    capacity = max(map(message_bytes, mine), default=0)
    for shipment in mine:
        if len(travelling) == _BUFFERS:
            land()
        buffer = pool(shipment).take(capacity)
        message = buffer[: message_bytes(shipment)]
        total = pack(shipment, message, lambda cut: read(cut.name, cut.box), handoff)
        for destination in shipment.destinations:
            sums[destination] = sums.get(destination, 0) + total
        futures = [links.over(rank, to).send(message, to, shipment.number) for to in shipment.children(rank)]
        travelling.append((shipment, buffer, futures))
    while travelling:
        land()
    if passing is not None:
        status.wait(passing, "what it passes on to be taken", watched)
    links.rest()
    sent, received = (now - then for now, then in zip(links.counts(), before, strict=True))
    return TransferStats(sent, received, sums)


def _pass_on(plan: HandoffPlan, rank: int, links: Links, status: StatusStore) -> None:
    """A trainer rank's part of the others' messages; a failure is everybody's to know."""
    try:
        for _ in incoming(plan, rank, links, status):
            pass
    except BaseException as error:
        status.fail(error)
        raise


@dataclass(frozen=True, slots=True)
class _Expected:
    """A message on its way to this rank."""

    shipment: Shipment
    parent: int
    arrival: Future[Arrival]
    into: Tensor | None
    """Memory from which it can be passed on; None where it ends here."""
    pool: BufferPool
    """Where ``into`` is from."""


def incoming(
    plan: HandoffPlan, rank: int, links: Links, status: StatusStore
) -> Iterator[tuple[Shipment, Tensor, bool]]:
    """What ``rank`` receives, in the order of the plan; each message is passed on, where it goes on, as it comes.

    Yields (shipment, message, whether it is its round's last). Messages stay as they are until the one after their
    round's last is asked for: whoever wants to keep something of them must have copied it by then.
    """
    through = deque(plan.through(rank))
    capacity = max(map(message_bytes, through), default=0)
    pools: Mapping[int, BufferPool] = {id(link): BufferPool(link.allocate) for link in links.all}
    under_way: deque[_Expected] = deque()
    held: list[tuple[_Expected, Arrival]] = []
    passing: list[tuple[Future[None], str]] = []
    while under_way or through:
        current = (under_way[0].shipment if under_way else through[0]).round
        while through and through[0].round <= current + _ROUNDS_AHEAD:
            under_way.append(_expect(through.popleft(), rank, links, pools, capacity))
        expected = under_way.popleft()
        shipment = expected.shipment
        arrival = status.wait(expected.arrival, f"{shipment.bucket.slots[0].spec} from {plan.who(expected.parent)}")
        held.append((expected, arrival))
        for child in shipment.children(rank):
            sent = links.over(rank, child).send(arrival.message, child, shipment.number)
            passing.append((sent, f"{plan.who(child)} to take {shipment.bucket.slots[-1].spec}"))
        last = not under_way or under_way[0].shipment.round != shipment.round
        yield shipment, arrival.message, last
        if last:
            for sent, what in passing:
                status.wait(sent, what)
            for expected, arrival in held:
                arrival.release()
                if expected.into is not None:
                    expected.pool.give(expected.into)
            passing.clear()
            held.clear()


def _expect(shipment: Shipment, rank: int, links: Links, pools: Mapping[int, BufferPool], capacity: int) -> _Expected:
    size, parent, children = message_bytes(shipment), shipment.parent(rank), shipment.children(rank)
    assert parent is not None
    pool = pools[id(links.over(rank, children[0]) if children else links.all[0])]
    into = pool.take(capacity) if children else None
    arrival = links.over(parent, rank).receive(size, parent, shipment.number, into)
    return _Expected(shipment, parent, arrival, into, pool)
