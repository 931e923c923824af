"""A rank's part in a handoff: it packs and sends messages, receives them, and passes on what goes further."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from or1_megatron.handoff.message.message import Shipment, pack
from or1_megatron.handoff.shard.plan import HandoffPlan
from or1_megatron.handoff.transport.base import Arrival, BufferPool
from or1_megatron.handoff.transport.group import open_group
from or1_megatron.handoff.transport.links import Links
from or1_megatron.handoff.transport.status_store import StatusStore, in_background
from or1_megatron.weights.holdings import Box

_BUFFERS = 2  # one is packed while the other travels or is read
_ROUNDS_AHEAD = 1  # receives of the next round are under way while this one is loaded


@dataclass
class TransferStats:
    """What a rank counted in one handoff."""

    bytes_sent: int = 0
    """By its transports, including what it passed on."""
    bytes_received: int = 0
    checksums: dict[int, int] = field(default_factory=dict)
    """By engine rank (numbered after the trainer's), sums of the checksums of the slices for it or received by it."""


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


class Transfer:
    """One rank's end of a connection, over which handoff follows handoff."""

    def __init__(self, plan: HandoffPlan, rank: int, links: Links, status: StatusStore) -> None:
        """``plan``: at least the part that ``rank`` has to do with."""
        self.plan, self.rank, self.links, self.status = plan, rank, links, status

    @classmethod
    def open(
        cls, plan: HandoffPlan, transport: str, rank: int, status: StatusStore, watched: Future[Any] | None = None
    ) -> Transfer:
        """Form a group of all ranks, and open the transports; blocks until all ranks do.

        Raises:
            HandoffError: a rank or ``watched`` failed, or not all ranks came in time.
        """
        store, world, timeout_s = status.tcp, plan.trainers + plan.engines, status.timeout_s
        opened = in_background(lambda: open_group(store, rank, world, timeout_s))
        group = status.wait(
            opened, f"{plan.trainers} trainer ranks and {plan.engines} engine ranks to form a group", watched
        )
        links = Links.open(transport, group, store, rank, world, plan.trainers, timeout_s)
        return cls(plan, rank, links, status)

    def stats_since(self, before: tuple[int, int], checksums: dict[int, int]) -> TransferStats:
        """Free the handoff's memory, and count its bytes; ``before``: what ``links.counts`` returned before it."""
        self.links.free_buffers()
        sent, received = (now - then for now, then in zip(self.links.counts(), before, strict=True))
        return TransferStats(sent, received, checksums)

    def send(
        self, read: Callable[[str, Box], Tensor], handoff: int, watched: Future[Any] | None = None
    ) -> TransferStats:
        """Pack and send the messages of this trainer rank, and pass on those that go through it.

        Args:
            read: returns a rectangle of a tensor that this rank holds.
            watched: a failure of this ends the waits.

        Raises:
            HandoffError: a rank failed, or did not keep up.
        """
        plan, rank, links = self.plan, self.rank, self.links
        before = links.counts()
        links.begin(plan.shipments, rank)  # two threads start messages
        passing = in_background(self._pass_on) if plan.through(rank) else None
        pools: dict[int, BufferPool] = {id(link): BufferPool(link.allocate) for link in links.all}
        travelling: deque[tuple[Shipment, Tensor, list[Future[None]]]] = deque()
        sums: dict[int, int] = {}

        def pool(shipment: Shipment) -> BufferPool:
            return pools[id(links.between(rank, shipment.children(rank)[0]))]

        def wait_for_first() -> None:
            shipment, buffer, futures = travelling.popleft()
            for future, child in zip(futures, shipment.children(rank), strict=True):
                self.status.wait(future, f"{plan.who(child)} to take {shipment.slots[-1].slice}", watched)
            pool(shipment).give(buffer)

        mine = plan.sent_by(rank)
        capacity = max((shipment.size_bytes for shipment in mine), default=0)
        for shipment in mine:
            if len(travelling) == _BUFFERS:
                wait_for_first()
            buffer = pool(shipment).take(capacity)
            message = buffer[: shipment.size_bytes]
            total = pack(shipment, message, lambda part: read(part.name, part.box), handoff)
            for destination in shipment.destinations:
                sums[destination] = sums.get(destination, 0) + total
            futures = [links.between(rank, to).send(message, to, shipment.number) for to in shipment.children(rank)]
            travelling.append((shipment, buffer, futures))
        while travelling:
            wait_for_first()
        if passing is not None:
            self.status.wait(passing, "what it passes on to be taken", watched)
        return self.stats_since(before, sums)

    def _pass_on(self) -> None:
        """Do a trainer rank's part in the others' messages; a failure ends everyone's wait."""
        try:
            for _ in self.receive():
                pass
        except BaseException as error:
            self.status.fail(error)
            raise

    def receive(self) -> Iterator[tuple[Shipment, Tensor, bool]]:
        """Receive this rank's messages in the order of the plan, and pass on, as they come, those that go further.

        Yields (shipment, message, whether it is its round's last). Messages stay as they are until the one after their
        round's last is asked for; what is needed of them afterwards must be copied by then.
        """
        plan, rank, links = self.plan, self.rank, self.links
        through = deque(plan.through(rank))
        capacity = max((shipment.size_bytes for shipment in through), default=0)
        pools = {id(link): BufferPool(link.allocate) for link in links.all}
        under_way: deque[_Expected] = deque()
        held: list[tuple[_Expected, Arrival]] = []
        passing: list[tuple[Future[None], str]] = []
        while under_way or through:
            current = (under_way[0].shipment if under_way else through[0]).round
            while through and through[0].round <= current + _ROUNDS_AHEAD:
                under_way.append(self._expect(through.popleft(), pools, capacity))
            expected = under_way.popleft()
            shipment = expected.shipment
            first = f"{shipment.slots[0].slice} from {plan.who(expected.parent)}"
            arrival = self.status.wait(expected.arrival, first)
            held.append((expected, arrival))
            for child in shipment.children(rank):
                sent = links.between(rank, child).send(arrival.message, child, shipment.number)
                passing.append((sent, f"{plan.who(child)} to take {shipment.slots[-1].slice}"))
            last = not under_way or under_way[0].shipment.round != shipment.round
            yield shipment, arrival.message, last
            if last:
                for sent, what in passing:
                    self.status.wait(sent, what)
                for expected, arrival in held:
                    arrival.release()
                    if expected.into is not None:
                        expected.pool.give(expected.into)
                passing.clear()
                held.clear()

    def _expect(self, shipment: Shipment, pools: dict[int, BufferPool], capacity: int) -> _Expected:
        rank, links = self.rank, self.links
        parent, children = shipment.parent(rank), shipment.children(rank)
        assert parent is not None
        pool = pools[id(links.between(rank, children[0]) if children else links.all[0])]
        into = pool.take(capacity) if children else None
        arrival = links.between(parent, rank).receive(shipment.size_bytes, parent, shipment.number, into)
        return _Expected(shipment, parent, arrival, into, pool)

    def close(self) -> None:
        self.links.close()
