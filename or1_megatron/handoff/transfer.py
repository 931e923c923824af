"""Runs one rank's part of a handoff plan: packs, sends and receives messages, and passes messages on in two hops."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from or1_megatron.handoff.failures import HandoffError
from or1_megatron.handoff.message.shipment import Shipment, pack
from or1_megatron.handoff.send_plan import HandoffPlan
from or1_megatron.handoff.transport.base import Arrival, BufferPool, Transport, chain
from or1_megatron.handoff.transport.links import Links
from or1_megatron.handoff.transport.status_store import StatusStore, in_background, open_group
from or1_megatron.runtime.timeline import span
from or1_megatron.weights.holdings import Box

_BUFFERS = 2  # one buffer is packed while the other travels or is read
_ROUNDS_AHEAD = 1  # receives of the next round are under way while a round is loaded


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A message that leaves this rank. Its buffer is free again when all receivers have taken the message."""

    shipment: Shipment
    taken: list[Future[None]]
    """A future for each receiver (``Shipment.children``), done once the receiver has taken the message."""
    buffer: Tensor
    pool: BufferPool
    """The pool of ``buffer``."""


class Transfer:
    """One rank's connection to the other ranks. All handoffs use it."""

    def __init__(self, plan: HandoffPlan, rank: int, links: Links, status: StatusStore) -> None:
        self.plan, self.rank, self.links, self.status = plan.of(rank), rank, links, status

    @classmethod
    def open(
        cls, plan: HandoffPlan, transport: str, rank: int, status: StatusStore, watched: Future[Any] | None = None
    ) -> Transfer:
        """Form a group of all ranks and open the transports. Blocks until all ranks have joined.

        Raises:
            HandoffError: a rank or the future ``watched`` failed, or not all ranks joined in time.
        """
        store, world, timeout_s = status.tcp, plan.trainers + plan.engines, status.timeout_s
        opened = in_background(lambda: open_group(store, rank, world, timeout_s))
        group = status.wait(
            opened, f"{plan.trainers} trainer ranks and {plan.engines} engine ranks to form a group", watched
        )
        links = Links.open(transport, group, store, rank, world, plan.trainers, timeout_s)
        return cls(plan, rank, links, status)

    def send(
        self, read: Callable[[str, Box], Tensor], handoff: int, watched: Future[Any] | None = None
    ) -> dict[int, int]:
        """Pack and send the messages of this trainer rank, and pass on messages that go through this rank.

        One thread starts all messages in the order of the plan. A message to pass on is sent once it has arrived.

        Args:
            read: returns a rectangle of a tensor that this rank holds.
            watched: a future whose failure ends the waits.

        Returns:
            For each engine rank (numbered after the trainer ranks), the sum of the checksums of the slices that this
            rank packed for it.

        Raises:
            HandoffError: a rank failed or was too slow.
        """
        packed, passing = deque[_Outgoing](), deque[_Outgoing]()
        pools: dict[Transport, BufferPool] = {link: BufferPool(link.allocate) for link in self.links.all}
        capacity = max((shipment.size_bytes for shipment in self.plan.shipments), default=0)
        sums: dict[int, int] = {}
        for shipment in self.plan.shipments:
            children = shipment.children(self.rank)
            pool = pools[self.links.between(self.rank, children[0])]
            if shipment.source == self.rank:
                if len(packed) == _BUFFERS:
                    self._finish(packed.popleft(), watched)
                buffer = pool.take(capacity)
                message = buffer[: shipment.size_bytes]
                with span("pack", round=shipment.round, to=[self.plan.who(rank) for rank in shipment.destinations]):
                    total = pack(shipment, message, lambda part: read(part.name, part.box), handoff)
                for destination in shipment.destinations:
                    sums[destination] = sums.get(destination, 0) + total
                packed.append(_Outgoing(shipment, self._send(shipment, message), buffer, pool))
            else:
                while passing and passing[0].shipment.round < shipment.round - _ROUNDS_AHEAD:
                    self._finish(passing.popleft(), watched)
                buffer = pool.take(capacity)
                passing.append(_Outgoing(shipment, [self._pass_on(shipment, buffer)], buffer, pool))
        for outgoing in (*packed, *passing):
            self._finish(outgoing, watched)
        self.links.free_buffers()
        return sums

    def receive(self) -> Iterator[tuple[Shipment, Tensor, bool]]:
        """Receive this engine rank's messages in the order of the plan.

        Yields (shipment, message, whether the message is the last of its round). The messages of a round stay valid
        until the first message of the next round is requested. Copy slices that are needed longer.
        """
        to_come = deque(self.plan.shipments)
        under_way = deque[tuple[Shipment, Future[Arrival]]]()
        held: list[Arrival] = []
        while under_way or to_come:
            current = (under_way[0][0] if under_way else to_come[0]).round
            while to_come and to_come[0].round <= current + _ROUNDS_AHEAD:
                shipment = to_come.popleft()
                under_way.append((shipment, self._receive(shipment)))
            shipment, arriving = under_way.popleft()
            with span("receive", round=shipment.round, sender=self.plan.who(shipment.via)):
                arrival = self.status.wait(arriving, f"{shipment.slots[0].slice} from {self.plan.who(shipment.via)}")
            held.append(arrival)
            last = not under_way or under_way[0][0].round != shipment.round
            yield shipment, arrival.message, last
            if last:
                for arrival in held:
                    arrival.release()
                held.clear()
        self.links.free_buffers()

    def _receive(self, shipment: Shipment, into: Tensor | None = None) -> Future[Arrival]:
        parent = shipment.parent(self.rank)
        assert parent is not None
        return self.links.between(parent, self.rank).receive(shipment.size_bytes, parent, shipment.number, into)

    def _send(self, shipment: Shipment, message: Tensor) -> list[Future[None]]:
        rank, number = self.rank, shipment.number
        return [self.links.between(rank, to).send(message, to, number) for to in shipment.children(rank)]

    def _pass_on(self, shipment: Shipment, into: Tensor) -> Future[None]:
        """Receive a message into the buffer ``into``, and send it on from there as soon as it has arrived."""
        passed: Future[None] = Future()

        def arrived(arriving: Future[Arrival]) -> None:
            try:
                (sent,) = self._send(shipment, arriving.result().message)
            except Exception as error:  # belongs to whoever waits for the future, which may be later
                passed.set_exception(error)
                in_background(lambda: self._report(shipment, passed))
            else:
                sent.add_done_callback(lambda sent: chain(sent, passed))

        self._receive(shipment, into).add_done_callback(arrived)
        return passed

    def _report(self, shipment: Shipment, failed: Future[None]) -> None:
        """Publish why a message was not passed on, so that the waits of all ranks end."""
        try:
            self.status.wait(failed, f"{shipment.slots[0].slice} to pass on")
        except HandoffError as error:
            self.status.fail(error)

    def _finish(self, outgoing: _Outgoing, watched: Future[Any] | None) -> None:
        """Wait until all receivers have taken a message, and give its buffer back to the pool."""
        shipment = outgoing.shipment
        for future, child in zip(outgoing.taken, shipment.children(self.rank), strict=True):
            self.status.wait(future, f"{self.plan.who(child)} to take {shipment.slots[-1].slice}", watched)
        outgoing.pool.give(outgoing.buffer)

    def close(self) -> None:
        self.links.close()
