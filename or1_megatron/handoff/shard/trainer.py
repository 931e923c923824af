"""A trainer rank's end of our ``shard`` backend; on every rank, and without vllm.

    rank 0                        other trainer ranks             engine ranks (shard_worker)
    host the board ──────────────▶ join it            ──────────▶ join it
                                                                  run the loaders on placeholders, publish their wants
    make the plan, publish it ──▶ read it             ──────────▶ read it
    ───────────────────────────── form one gloo group, open the transports ──────────────
    each handoff:
    start_weight_update, update_weights to the engines
    pack and send own messages    pack and send own messages      receive, compare checksums, load
    pass on others' (two hops)    pass on others' (two hops)      pass on (relayed)
    compare what was sent with what was received
    finish_weight_update

vLLM's trainer factory is not used: every trainer rank would have to import vllm for it, and only rank 0 has a client.

What is sent is what the policy computes with: with ``model.dtype: bfloat16`` its bf16 parameters, not the optimizer's
fp32 masters. Megatron rounds the masters to the parameters after every update, so a cast of the masters would give the
same bits; but they are cut over the replicas by the distributed optimizer, and may lie on the host.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch.distributed import TCPStore

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.errors import HandoffError
from or1_megatron.handoff.shard.plan import HandoffPlan, make_plan
from or1_megatron.handoff.shard.routes import routes_for
from or1_megatron.handoff.shard.transfer import TransferStats, ship
from or1_megatron.handoff.transport.group import join_store, open_group, open_store
from or1_megatron.handoff.transport.links import Links, this_location
from or1_megatron.handoff.transport.status_store import StatusStore, in_background
from or1_megatron.interfaces import EngineControl, PolicyWeights

BACKEND = "shard"


class ShardTrainer:
    """One trainer rank. ``connect`` and ``send`` are collective over the trainer's ranks."""

    def __init__(self, weights: PolicyWeights, rank: int, config: HandoffConfig, client: EngineControl | None) -> None:
        """``client``: on rank 0 alone."""
        self._weights, self._rank, self._config, self._client = weights, rank, config, client
        self._status: StatusStore | None = None
        self._links: Links | None = None
        self._plan: HandoffPlan | None = None
        self._store: TCPStore | None = None
        self._handoffs = 0
        self._engine_ranks = 0
        self.stats: list[TransferStats] = []
        """On rank 0: of all trainer ranks, then all engine ranks, in the last handoff."""

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
        if self._links is not None:
            return
        location, store = None, None
        if self._client is not None:
            store = open_store(self._client.address, self._config.timeout_s)
            engine_ranks = self._client.engines * self._client.workers_per_engine
            location = (self._client.address, store.port, engine_ranks)
        address, port, engine_ranks = self._weights.from_rank_0(location)
        self._store = store or join_store(address, port, self._config.timeout_s)
        self._status = StatusStore(self._store, f"trainer rank {self._rank}", self._config.timeout_s)
        try:
            self._meet(self._status, address, port, engine_ranks)
        except BaseException as error:
            self._break_off(error)
            raise

    def _meet(self, status: StatusStore, address: str, port: int, engine_ranks: int) -> None:
        trainers = self._weights.ranks
        self._engine_ranks, world = engine_ranks, trainers + engine_ranks
        joined: Future[None] | None = None
        if self._client is not None:
            client, payload = self._client, self._payload(address, port, trainers, world)
            joined = in_background(lambda: client.init_weight_transfer_engine(payload))
            self._publish_plan(status, engine_ranks, joined)
        else:
            status.publish(f"place/{self._rank}", this_location())
            self._weights.metadata()  # the first call may be collective
        self._plan = status.read(f"plan/{self._rank}", "trainer rank 0", watched=joined)
        store, timeout_s, name = self._store, self._config.timeout_s, self._config.transport
        assert store is not None
        opened = in_background(lambda: open_group(store, address, self._rank, world, timeout_s))
        group = status.wait(opened, f"{engine_ranks} engine ranks and {trainers} trainer ranks to form a group", joined)
        self._links = Links.open(name, group, store, self._rank, world, trainers, timeout_s)
        if joined is not None:
            status.wait(joined, f"{engine_ranks} engine ranks to be ready for handoffs")

    def _payload(self, address: str, port: int, trainers: int, world: int) -> dict[str, Any]:
        assert self._client is not None
        return {
            "address": address,
            "port": port,
            "trainers": trainers,
            "world_size": world,
            "workers_per_engine": self._client.workers_per_engine,
            "timeout_s": self._config.timeout_s,
            "transport": self._config.transport,
            "tensors": [
                (name, str(dtype).removeprefix("torch."), list(shape))
                for name, dtype, shape in self._weights.metadata()
            ],
        }

    def _publish_plan(self, status: StatusStore, engine_ranks: int, joined: Future[None]) -> None:
        """Each rank's own shipments, from the wants of all engine ranks."""
        trainers = self._weights.ranks
        told = [
            status.read(f"wants/{index}", f"engine rank {index}", keep=False, watched=joined)
            for index in range(engine_ranks)
        ]
        others = [status.read(f"place/{rank}", f"trainer rank {rank}", keep=False) for rank in range(1, trainers)]
        routes = routes_for(self._config.transport, [this_location(), *others], [location for _, location in told])
        wants = [wanted for wanted, _ in told]
        plan = make_plan(self._weights.holdings(), wants, trainers, self._config.bucket_bytes, routes)
        for rank in range(trainers + engine_ranks):
            status.publish(f"plan/{rank}", plan.of(rank))

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self) -> int:
        """One handoff, start to finish. Returns the bytes that all trainer ranks sent (on other ranks: this rank's).

        Raises:
            HandoffError: somebody failed, did not keep up, or received other bytes than were sent.
        """
        self.connect()
        status = self._status
        assert status is not None
        self._handoffs += 1
        try:
            receiving: Future[None] | None = None
            if self._client is not None:
                client, info = self._client, {"handoff": self._handoffs}

                def receive() -> None:
                    client.start_weight_update()  # what this rank packs first can wait for it
                    client.update_weights(info)

                receiving = in_background(receive)
            stats = self._ship(status, receiving)
            status.publish(f"sent/{self._handoffs}/{self._rank}", stats)
            if self._client is None or receiving is None:
                return stats.bytes_sent
            status.wait(receiving, f"{self._client.engines} engines to load the weights")
            total = self._compare(status)
            self._client.finish_weight_update()
            return total
        except BaseException as error:
            self._break_off(error)
            raise

    def _ship(self, status: StatusStore, receiving: Future[None] | None) -> TransferStats:
        assert self._links is not None
        return ship(self.plan, self._rank, self._links, status, self._weights.read, self._handoffs, receiving)

    def _compare(self, status: StatusStore) -> int:
        """What the engine ranks say they received against what the trainer ranks say they sent.

        Returns the bytes that the trainer ranks have sent.
        """
        expected = dict[int, int]()
        trainers, handoff = self.plan.trainers, self._handoffs
        self.stats = [
            status.read(f"sent/{handoff}/{rank}", f"trainer rank {rank}", keep=False) for rank in range(trainers)
        ]
        for each in self.stats:
            for destination, value in each.checksums.items():
                expected[destination] = expected.get(destination, 0) + value
        for index in range(self._engine_ranks):
            rank = trainers + index
            theirs = status.read(f"received/{handoff}/{rank}", f"engine rank {index}", keep=False)
            self.stats.append(theirs)
            if theirs.checksums.get(rank, 0) != expected.get(rank, 0):
                raise HandoffError(
                    f"handoff {handoff}: engine rank {index} received slices whose checksums sum up to "
                    f"{theirs.checksums.get(rank, 0):x}; those that were sent sum up to {expected.get(rank, 0):x}"
                )
        sent = sum(each.bytes_sent for each in self.stats)
        received = sum(each.bytes_received for each in self.stats)
        if sent != received:
            raise HandoffError(f"handoff {handoff}: {sent} bytes were sent, {received} received")
        return sum(each.bytes_sent for each in self.stats[:trainers])

    def _break_off(self, error: BaseException) -> None:
        """The next handoff must meet the engines anew. The board stays for the others to read until then."""
        store = self._store
        if self._status is not None:
            self._status.fail(error)
        self.close()
        self._store = store

    def close(self) -> None:
        """Leave the engines. They find the board gone, should they still wait."""
        if self._links is not None:
            self._links.close()
        self._links, self._plan, self._status, self._store = None, None, None, None
        self._handoffs = 0
