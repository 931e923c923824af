"""Plans carried out by ranks that are threads, over real transports: what arrives, in which order things happen.

No engine and no model: tensors are random, and "loading" is putting rectangles together. Not tried here: processes
that die (train/test_in_flight_over_handoffs), several nodes, GPUs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from or1_megatron.handoff.failures import HandoffError, SliceMismatch
from or1_megatron.handoff.message.shipment import unpack
from or1_megatron.handoff.message.slices import Slice
from or1_megatron.handoff.send_plan import make_plan
from or1_megatron.handoff.transfer import Transfer
from or1_megatron.handoff.transport.base import Arrival, GlooTransport
from or1_megatron.handoff.transport.choice import choose_transport, neighbours_of, round_bytes
from or1_megatron.handoff.transport.links import Location
from or1_megatron.handoff.transport.status_store import StatusStore, in_background, join_store, open_store
from or1_megatron.weights.holdings import Box, Holding, whole

DEADLINE_S = 120.0
SHAPES = {"a": (64, 24), "b": (40, 8), "n": (24,)}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "n": torch.float32}
WHOLE = [Slice(name, whole(shape), DTYPES[name]) for name, shape in SHAPES.items()]
TRANSPORTS = ("gloo", "shared_memory", "gloo+shared_memory")  # that run here


class Ranks:
    """``trainers`` ranks with the rows of everything cut among them, and engine ranks; all on one node."""

    def __init__(self, transport: str, trainers: int, wants: list[list[Slice]], bucket_bytes: int) -> None:
        self.trainers, self.world, self.wants = trainers, trainers + len(wants), wants
        generator = torch.Generator().manual_seed(1)
        self.tensors = {name: torch.randn(s, generator=generator).to(DTYPES[name]) for name, s in SHAPES.items()}
        held = []
        for name, (rows, *rest) in SHAPES.items():
            cuts = [rows * rank // trainers for rank in range(trainers + 1)]
            held += [Holding(name, ((cuts[r], cuts[r + 1]), *whole(rest)), (r,)) for r in range(trainers)]
        here = Location("here", "")
        near = neighbours_of(transport, [here] * trainers, [here] * len(wants))
        self.plan = make_plan(held, wants, trainers, bucket_bytes, near)
        self._server = open_store("127.0.0.1", DEADLINE_S)

        def meet(rank: int) -> Transfer:
            store = join_store("127.0.0.1", self._server.port, DEADLINE_S)  # of its own: a wait blocks a shared one
            status = StatusStore(store, self.plan.who(rank), DEADLINE_S)
            return Transfer.open(self.plan, transport, rank, status)

        with ThreadPoolExecutor(self.world) as pool:
            self.transfers = list(pool.map(meet, range(self.world)))
        self.links = [transfer.links for transfer in self.transfers]

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][tuple(slice(*bounds) for bounds in box)]

    def send(self, rank: int, handoff: int, read: Callable[[str, Box], Tensor] | None = None) -> Any:
        return self.transfers[rank].send(read or self.read, handoff)

    def load(self, rank: int, handoff: int) -> dict[str, Tensor]:
        """What an engine rank has received, with NaN where nothing came."""
        found = {name: torch.full(shape, torch.nan, dtype=DTYPES[name]) for name, shape in SHAPES.items()}
        for shipment, message, _ in self.transfers[rank].receive():
            for each in unpack(shipment, message, handoff):
                each.verify()
                part = found[each.slice.name][tuple(slice(*bounds) for bounds in each.slice.box)]
                assert part.isnan().all(), f"{each.slice} came twice"
                part.copy_(each.values)
        return found

    def hand_off(self, handoff: int, **reads: Any) -> tuple[list[Any], list[dict[str, Tensor]]]:
        """(the trainer ranks' sums of checksums, what each engine rank has)."""
        with ThreadPoolExecutor(self.world) as pool:
            sent = [pool.submit(self.send, r, handoff, reads.get(f"read_{r}")) for r in range(self.trainers)]
            loaded = [pool.submit(self.load, rank, handoff) for rank in range(self.trainers, self.world)]
            return [future.result() for future in sent], [future.result() for future in loaded]

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.close()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*args: Any) -> Ranks:
        made.append(Ranks(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check(ranks: Ranks, loaded: list[dict[str, Tensor]]) -> None:
    for wants, found in zip(ranks.wants, loaded, strict=True):
        for name, tensor in ranks.tensors.items():
            expected = torch.full_like(tensor, torch.nan)
            for want in wants:
                if want.name == name:
                    place = tuple(slice(*bounds) for bounds in want.box)
                    expected[place] = tensor[place]
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0, equal_nan=True)


HALVES = [
    [Slice("a", ((0, 64), (0, 10)), DTYPES["a"]), WHOLE[2]],
    [Slice("a", ((0, 64), (10, 24)), DTYPES["a"]), Slice("b", ((3, 40), (0, 8)), DTYPES["b"])],
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("trainers", "wants"), [(1, [WHOLE] * 4), (4, [WHOLE] * 2), (3, HALVES * 2)], ids=["one to four", "4 to 2", "cut"]
)
def test_every_engine_rank_gets_what_it_wants_once(
    ranks: Any, transport: str, trainers: int, wants: list[list[Slice]]
) -> None:
    """Buckets of 1 KiB, of 7 KiB that there are: many rounds, twice."""
    made = ranks(transport, trainers, wants, 1024)
    taken_in = Counter[Any]()
    for shipment in made.plan.shipments:
        taken_in[shipment.round, shipment.destinations] += shipment.slots[-1].end_bytes
    assert max(taken_in.values()) <= 1024
    for handoff in (1, 2):
        for tensor in made.tensors.values():
            tensor.mul_(1.25)
        check(made, made.hand_off(handoff)[1])


class OneAtATime(GlooTransport):
    """As strict as NCCL may be: what a rank starts is through before what it starts next, and holds that up."""

    def __init__(self, group: Any) -> None:
        super().__init__(group, DEADLINE_S)
        self._queue = ThreadPoolExecutor(1)

    def _through(self, start: Callable[[], Any], result: Any) -> Future[Any]:
        def whole() -> Any:
            start().wait(timedelta(seconds=DEADLINE_S))
            return result

        return self._queue.submit(whole)

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        return self._through(lambda: self._group.send([buffer], destination, number), None)

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        assert into is not None
        arrival = Arrival(into[:size_bytes], lambda: None)
        return self._through(lambda: self._group.recv([arrival.message], source, number), arrival)

    def close(self) -> None:
        self._queue.shutdown()
        super().close()


def test_two_hops_end_where_each_rank_has_one_queue(ranks: Any) -> None:
    """Three trainer ranks send to each other and pass on: in any other order than the plan's they block."""
    made = ranks("gloo+shared_memory", 3, [WHOLE] * 3, 1024)
    for links in made.links:
        links._network = OneAtATime(links._network._group)
    for handoff in (1, 2):
        check(made, made.hand_off(handoff)[1])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_packing_goes_on_while_a_message_travels_and_stops_at_two(ranks: Any, transport: str) -> None:
    """The engine takes nothing until the second message has been packed: that never came without a second buffer.

    And before it has taken the first, no third has been.
    """
    made = ranks(transport, 1, [WHOLE], 2048)
    first, second = made.plan.shipments[:2]
    packed: list[str] = []
    packed_two = threading.Event()

    def read(name: str, box: Box) -> Tensor:
        packed.append(f"{name} {box}")
        if len(packed) == len(first.slots) + len(second.slots):
            packed_two.set()
        return made.read(name, box)

    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(made.send, 0, 1, read)
        assert packed_two.wait(DEADLINE_S)
        assert len(packed) == len(first.slots) + len(second.slots)
        loaded = pool.submit(made.load, 1, 1).result(DEADLINE_S)
        sending.result(DEADLINE_S)
    check(made, [loaded])
    assert len(packed) == sum(len(s.slots) for s in made.plan.shipments)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_next_round_arrives_while_one_is_loaded(
    ranks: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever loads round 0 need not ask for round 1 to have it sent."""
    made = ranks(transport, 1, [WHOLE], 2048)
    arrivals: list[Future[Arrival]] = []
    for link in made.links[1].all:

        def receive(*args: Any, real: Any = link.receive) -> Future[Arrival]:
            arrivals.append(real(*args))
            return arrivals[-1]

        monkeypatch.setattr(link, "receive", receive)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(made.send, 0, 1)
        messages = made.transfers[1].receive()
        first, _, last = next(messages)
        assert last and first.round == 0
        arrivals[1].result(DEADLINE_S)
        assert made.plan.shipments[1].round == 1 and not sending.done()
        for _ in messages:
            pass
        sending.result(DEADLINE_S)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_trainer_holds_two_buckets_at_most(ranks: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the memory that the trainer ranks' transports were asked for, in two hops for passing on too."""
    made = ranks(transport, 4, [WHOLE] * 4, 4096)
    asked = Counter[int]()
    for rank in range(4):
        for link in made.links[rank].all:

            def allocate(size_bytes: int, rank: int = rank, real: Any = link.allocate) -> Tensor:
                asked[rank] += size_bytes
                return real(size_bytes)

            monkeypatch.setattr(link, "allocate", allocate)
    made.hand_off(1)
    sums_bytes = 8 * max(len(s.slots) for s in made.plan.shipments)
    assert all(0 < size <= 2 * (4096 + 5 * (sums_bytes + 8)) for size in asked.values())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_that_cannot_read_ends_everybodys_wait(ranks: Any, transport: str) -> None:
    made = ranks(transport, 2, [WHOLE] * 2, 1024)

    def broken(name: str, box: Box) -> Tensor:
        error = RuntimeError("out of memory")
        made.transfers[1].status.fail(error)
        raise error

    with pytest.raises((HandoffError, RuntimeError), match="out of memory"):
        made.hand_off(1, read_1=broken)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_leaves_waits_for_nobody(ranks: Any, transport: str) -> None:
    """A trainer rank that closes while nobody takes its messages: its own waits end, and not by their deadline."""
    made = ranks(transport, 1, [WHOLE], 2048)
    sent_one = threading.Event()
    first = len(made.plan.shipments[0].slots)
    reads: list[str] = []

    def read(name: str, box: Box) -> Tensor:
        reads.append(name)
        if len(reads) > first:
            sent_one.set()
        return made.read(name, box)

    sending = in_background(lambda: made.send(0, 1, read))
    assert sent_one.wait(DEADLINE_S)
    made.links[0].close()
    with pytest.raises(HandoffError, match="waited for engine rank 0 to take"):
        sending.result(2 * DEADLINE_S)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_changed_after_packing_are_noticed(ranks: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ranks(transport, 2, [WHOLE] * 2, 1024)
    link = made.links[1].between(1, 3)

    def faulty(buffer: Tensor, destination: int, number: int, real: Any = link.send) -> Any:
        if destination == 3:  # where memory is shared, the other engine reads it too
            buffer[5] ^= 64
        return real(buffer, destination, number)

    monkeypatch.setattr(link, "send", faulty)

    def load(rank: int) -> Any:
        try:
            return made.load(rank, 1)
        except BaseException as error:
            made.transfers[rank].status.fail(error)
            raise

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(made.send, rank, 1) for rank in (0, 1)] + [pool.submit(load, rank) for rank in (2, 3)]
        errors = [future.exception(DEADLINE_S) for future in futures]
    assert any(isinstance(error, SliceMismatch) for error in errors)
    assert any("did not arrive as it was sent" in str(error) for error in errors[:2])


def test_transport_is_chosen_by_where_ranks_run() -> None:
    here, there = Location("n0", ""), Location("n1", "")
    gpus = [Location("n0", "GPU-0"), Location("n0", "GPU-1"), Location("n1", "GPU-2")]
    assert choose_transport([here, here], [here]) == "shared_memory"
    assert choose_transport([here, here], [here, there]) == choose_transport([here, there], [here]) == "gloo"
    assert choose_transport(gpus, gpus) == "nccl+cuda_ipc"
    assert choose_transport(gpus[:2], gpus[2:]) == "nccl"


def test_messages_through_host_memory_are_small() -> None:
    """However large a bucket may be; a smaller one is kept. Between GPUs they fill it. Not shown: that it is faster."""
    for transport in TRANSPORTS:
        assert round_bytes(transport, 512 << 20) == 32 << 20 and round_bytes(transport, 40_000) == 40_000
    for transport in ("nccl", "cuda_ipc", "nccl+cuda_ipc"):
        assert round_bytes(transport, 512 << 20) == 512 << 20


def test_plans_for_two_hops_name_what_stands_wrong() -> None:
    here, gpu = Location("n0", ""), Location("n0", "GPU-1")
    with pytest.raises(HandoffError, match="engine rank 1 has none beside it"):
        neighbours_of("gloo+shared_memory", [here], [here, Location("n1", "")])
    with pytest.raises(HandoffError, match=r"one node.*engine rank 0 is not where"):
        neighbours_of("shared_memory", [here], [Location("n1", "")])
    with pytest.raises(HandoffError, match="NCCL refuses two ranks on one"):
        neighbours_of("nccl", [gpu], [gpu])
