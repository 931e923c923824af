"""A trainer rank's end of our ``shard`` backend; on every rank, and without vllm.

    rank 0                        other trainer ranks             engine ranks (shard_worker)
    host the board ──────────────▶ join it            ──────────▶ join it
                                                                  run the loaders on placeholders, publish their wants
    make the plan, publish it ──▶ read it             ──────────▶ read it
    ───────────────────────────── form one gloo group ──────────────────────────────────
    each handoff:
    start_weight_update, update_weights to the engines
    pack and send own buckets     pack and send own buckets       receive, compare checksums, load
    compare what was sent with what was received
    finish_weight_update

vLLM's trainer factory is not used: every trainer rank would have to import vllm for it, and only rank 0 has a client.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import Store

from or1_megatron.config import HandoffConfig
from or1_megatron.handoff.gloo import HandoffError, join_store, open_group, open_store
from or1_megatron.handoff.plan import HandoffPlan, Shipment, make_plan
from or1_megatron.handoff.shipping import message_bytes, seal
from or1_megatron.handoff.wire import Board, GlooTransport, Transport, allocate, in_background
from or1_megatron.interfaces import WeightShards
from or1_megatron.weights.holdings import Box, Holding

BACKEND = "shard"
_BUFFERS = 2  # one is packed while the other travels


class SlicedWeights(WeightShards, Protocol):
    """A policy's weights, also by slices, without collectives."""

    def holdings(self) -> list[Holding]:
        """Which trainer rank holds what; the same on every rank."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A rectangle that this rank holds, as a view."""
        ...

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank; collective."""
        ...

    @property
    def ranks(self) -> int: ...


class EngineClient(Protocol):
    """What rank 0 needs of the engines: vLLM's ``VLLMWeightSyncClient`` and their number."""

    engines: int
    workers_per_engine: int
    address: str

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class ShardSender:
    """One trainer rank. ``connect`` and ``send`` are collective over the trainer's ranks."""

    def __init__(self, weights: SlicedWeights, rank: int, config: HandoffConfig, client: EngineClient | None) -> None:
        """``client``: on rank 0 alone."""
        self._weights, self._rank, self._config, self._client = weights, rank, config, client
        self._board: Board | None = None
        self._transport: Transport | None = None
        self._plan: HandoffPlan | None = None
        self._store: Store | None = None
        self._handoffs = 0
        self.received: dict[int, int] = {}
        """On rank 0: bytes that each engine rank counted in the last handoff."""

    @property
    def plan(self) -> HandoffPlan:
        assert self._plan is not None, "not connected"
        return self._plan

    # -- meeting -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Meet the engines and make the plan; nothing to do when that has been done.

        Raises:
            HandoffError: somebody failed, or did not come within ``timeout_s``.
        """
        if self._transport is not None:
            return
        place, store = None, None
        if self._client is not None:
            store = open_store(self._client.address, self._config.timeout_s)
            engine_ranks = self._client.engines * self._client.workers_per_engine
            place = (self._client.address, store.port, engine_ranks)
        address, port, engine_ranks = self._weights.from_rank_0(place)
        self._store = store or join_store(address, port, self._config.timeout_s)
        self._board = Board(self._store, f"trainer rank {self._rank}", self._config.timeout_s)
        try:
            self._meet(self._board, address, port, engine_ranks)
        except BaseException as error:
            self._break_off(error)
            raise

    def _meet(self, board: Board, address: str, port: int, engine_ranks: int) -> None:
        trainers = self._weights.ranks
        world = trainers + engine_ranks
        joined: Future[None] | None = None
        if self._client is not None:
            client, payload = self._client, self._payload(address, port, trainers, world)
            joined = in_background(lambda: client.init_weight_transfer_engine(payload))
            self._publish_plan(board, engine_ranks, joined)
        else:
            self._weights.metadata()  # the first call may be collective
        self._plan = board.read(f"plan/{self._rank}", "trainer rank 0", watched=joined)
        store, timeout_s = self._store, self._config.timeout_s
        assert store is not None
        opened = in_background(lambda: open_group(store, address, self._rank, world, timeout_s))  # type: ignore[arg-type]
        group = board.wait(opened, f"{engine_ranks} engine ranks and {trainers} trainer ranks to form a group", joined)
        if joined is not None:
            board.wait(joined, f"{engine_ranks} engine ranks to be ready for handoffs")
        self._transport = GlooTransport(group, timeout_s)

    def _payload(self, address: str, port: int, trainers: int, world: int) -> dict[str, Any]:
        assert self._client is not None
        return {
            "address": address,
            "port": port,
            "trainers": trainers,
            "world_size": world,
            "workers_per_engine": self._client.workers_per_engine,
            "timeout_s": self._config.timeout_s,
            "tensors": [
                (name, str(dtype).removeprefix("torch."), list(shape))
                for name, dtype, shape in self._weights.metadata()
            ],
        }

    def _publish_plan(self, board: Board, engine_ranks: int, joined: Future[None]) -> None:
        """Each rank's own shipments, from the wants of all engine ranks."""
        wants = [
            board.read(f"wants/{index}", f"engine rank {index}", keep=False, watched=joined)
            for index in range(engine_ranks)
        ]
        dtypes = {name: dtype for name, dtype, _ in self._weights.metadata()}
        trainers = self._weights.ranks
        plan = make_plan(self._weights.holdings(), dtypes, wants, trainers, self._config.bucket_bytes)
        for rank in range(trainers + engine_ranks):
            mine = plan.sent_by(rank) if rank < trainers else plan.received_by(rank)
            board.publish(f"plan/{rank}", HandoffPlan(trainers, tuple(mine)))

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self) -> int:
        """One handoff, start to finish. Returns the bytes that all trainer ranks sent (on other ranks: this rank's).

        Raises:
            HandoffError: somebody failed, did not keep up, or received other bytes than were sent.
        """
        self.connect()
        board = self._board
        assert board is not None
        self._handoffs += 1
        try:
            receiving: Future[None] | None = None
            if self._client is not None:
                client, info = self._client, {"handoff": self._handoffs}
                client.start_weight_update()
                receiving = in_background(lambda: client.update_weights(info))
            sent, sums = self._ship(board, receiving)
            board.publish(f"sent/{self._handoffs}/{self._rank}", (sent, sums))
            if self._client is None or receiving is None:
                return sent
            board.wait(receiving, f"{self._client.engines} engines to load the weights")
            total = self._compare(board)
            self._client.finish_weight_update()
            return total
        except BaseException as error:
            self._break_off(error)
            raise

    def _ship(self, board: Board, receiving: Future[None] | None) -> tuple[int, dict[int, int]]:
        """(bytes on the wire, by destination the sum of the checksums)."""
        assert self._transport is not None
        shipments = self.plan.shipments
        size = max((message_bytes(shipment) for shipment in shipments), default=0)
        idle = [allocate(size) for _ in range(min(_BUFFERS, len(shipments)))]
        travelling: deque[tuple[Future[None], Tensor, Shipment]] = deque()
        sent, sums = 0, dict.fromkeys((shipment.destination for shipment in shipments), 0)

        def land() -> None:
            future, buffer, shipment = travelling.popleft()
            what = f"engine rank {shipment.destination - self.plan.trainers} to take {shipment.bucket.slots[-1].spec}"
            board.wait(future, what, receiving)
            idle.append(buffer)

        for shipment in shipments:
            if not idle:
                land()
            buffer = idle.pop()
            message = buffer[: message_bytes(shipment)]
            for slot in shipment.bucket.slots:
                slot.view(message).copy_(self._weights.read(slot.spec.name, slot.spec.box))
            sums[shipment.destination] += seal(shipment, message, self._handoffs)
            future = self._transport.send(message, shipment.destination, shipment.number)
            travelling.append((future, buffer, shipment))
            sent += message.numel()
        while travelling:
            land()
        return sent, sums

    def _compare(self, board: Board) -> int:
        """What the engine ranks say they received against what the trainer ranks say they sent; bytes sent."""
        total, expected = 0, dict[int, int]()
        for rank in range(self._weights.ranks):
            sent, sums = board.read(f"sent/{self._handoffs}/{rank}", f"trainer rank {rank}", keep=False)
            total += sent
            for destination, value in sums.items():
                expected[destination] = expected.get(destination, 0) + value
        self.received = {}
        for destination, value in sorted(expected.items()):
            index = destination - self.plan.trainers
            key = f"received/{self._handoffs}/{destination}"
            received, theirs = board.read(key, f"engine rank {index}", keep=False)
            self.received[index] = received
            if theirs != value:
                raise HandoffError(
                    f"handoff {self._handoffs}: engine rank {index} received slices whose checksums sum up to "
                    f"{theirs:x}; those that were sent sum up to {value:x}"
                )
        if (arrived := sum(self.received.values())) != total:
            raise HandoffError(f"handoff {self._handoffs}: {total} bytes were sent, {arrived} received")
        return total

    def _break_off(self, error: BaseException) -> None:
        """The next handoff must meet the engines anew. The board stays for the others to read until then."""
        store = self._store
        if self._board is not None:
            self._board.fail(error)
        self.close()
        self._store = store

    def close(self) -> None:
        """Leave the engines. They find the board gone, should they still wait."""
        if isinstance(self._transport, GlooTransport):
            self._transport.close()
        self._transport, self._plan, self._board, self._store = None, None, None, None
        self._handoffs = 0
