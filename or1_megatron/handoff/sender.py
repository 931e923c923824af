"""The trainer's side of a weight handoff: ranks send their slices; rank 0 compares the checksums received and sent.

    rank 0                        other trainer ranks             engine ranks (vllm/receiver.py)
    host the status store ──────▶ join it            ──────────▶ join it
    publish the tensors ────────────────────────────────────────▶ run the loaders on placeholders, publish their wants
    make the plan, publish it ──▶ read it             ──────────▶ read it
    ───────────────────────────── form one gloo group, open the transports ──────────────
    each handoff:
    start_weight_update, update_weights to the engines
    pack and send own messages    pack and send own messages      receive, compare checksums, load
    pass on messages (two hops)   pass on messages (two hops)
    compare what was sent with what was received
    finish_weight_update

vLLM's trainer factory is not used: it needs vllm and a client of the engines on every rank; only rank 0 has a client.

The ranks send the parameters with which the policy computes. For ``model.dtype: bfloat16`` these are bf16 parameters,
not the optimizer's fp32 master weights. After every update Megatron rounds the masters to the parameters, so a cast of
the masters would give equal bits. But the distributed optimizer shards the masters over replicas, perhaps on the host.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.failures import HandoffError, SendError
from or1_megatron.handoff.message.slices import whole_tensor
from or1_megatron.handoff.send_plan import HandoffPlan, make_plan
from or1_megatron.handoff.transfer import Transfer
from or1_megatron.handoff.transport.choice import choose_transport, neighbours_of, round_bytes
from or1_megatron.handoff.transport.links import this_location
from or1_megatron.handoff.transport.status_store import StatusStore, in_background, join_store, open_store
from or1_megatron.interfaces import PolicyWeights
from or1_verify.errors import UserError

if TYPE_CHECKING:
    from or1_megatron.rollout.engine_group import EngineGroup

log = logging.getLogger(__name__)


class WeightSender:
    """Sends the policy's weights to the engines. Each trainer rank has one sender."""

    def __init__(
        self, weights: PolicyWeights, rank: int, config: HandoffConfig, engines: EngineGroup | None = None
    ) -> None:
        """``engines``: required on rank 0; ignored on other ranks."""
        self._weights, self._rank, self._config = weights, rank, config
        self._engines = engines if rank == 0 else None
        self._status: StatusStore | None = None
        self._transfer: Transfer | None = None
        self._handoffs = 0
        self.plan: HandoffPlan | None = None
        """The whole handoff plan, on rank 0 once the engines are connected; else None."""

    def send(self, version: int) -> int:
        """Send the weights to every engine as ``version``, and empty the prefix caches. A collective call of all ranks.

        Connects to the engines if necessary. Returns the bytes that all trainer ranks sent (on rank 0), or that this
        rank sent (on other ranks).

        Raises:
            SendError: on every rank, when an engine or a trainer rank failed, or was slower than ``timeout_s``.
        """
        sent = 0
        error: SendError | None = None
        try:
            sent = self._send()
            if self._engines is not None:
                self._engines.finish_weight_update(version)
        except BaseException as failure:
            if self._status is not None:
                self._status.fail(failure)
            if not isinstance(failure, RuntimeError) or not isinstance(failure, UserError):
                raise  # an error in this rank's own code
            log.info("the handoff failed", exc_info=True)
            error = SendError(str(failure))
        # Rank 0 sees whatever fails among the engines and the other ranks.
        error = self._weights.from_rank_0(error) or error
        if error is not None:
            self.close()
            raise error
        return sent

    def _send(self) -> int:
        """Make one handoff up to the comparison of checksums, and return the bytes sent."""
        self._transfer = transfer = self._transfer or self._connect()
        self._handoffs += 1
        receiving = None if self._engines is None else self._start_receiving(self._engines)
        sums = transfer.send(self._weights.read, self._handoffs, receiving)
        transfer.status.publish(f"sent/{self._handoffs}/{self._rank}", sums)
        if self._engines is None or receiving is None:
            return transfer.plan.bytes_sent()[self._rank]
        transfer.status.wait(receiving, f"{self._engines.engines} engines to load the weights")
        assert self.plan is not None
        self._compare(self.plan, transfer.status)
        sent = self.plan.bytes_sent()
        return sum(sent[rank] for rank in range(self.plan.trainers))

    def close(self) -> None:
        """Disconnect from the engines. The next handoff connects again.

        The status store stays open until the next handoff, so that other ranks can read the failure.
        """
        if self._transfer is not None:
            self._transfer.close()
        self._transfer, self._handoffs = None, 0

    # -- connecting ----------------------------------------------------------------------------------------------

    def _connect(self) -> Transfer:
        """Connect to the engines and make the plan.

        Raises:
            HandoffError: a rank failed, or did not connect within ``timeout_s``.
        """
        timeout_s = self._config.timeout_s
        address, store = None, None
        if self._engines is not None:
            store = open_store(self._engines.address, timeout_s)
            address = (store.host, store.port)
        host, port = self._weights.from_rank_0(address)
        store = store or join_store(host, port, timeout_s)
        self._status = status = StatusStore(store, f"trainer rank {self._rank}", timeout_s)
        joined: Future[None] | None = None
        if self._engines is not None:
            joined = self._invite(self._engines, status)
            self.plan = self._publish_plan(self._engines, status, joined)
        else:
            status.publish(f"location/{self._rank}", this_location())
        transport, plan = status.read(f"plan/{self._rank}", "trainer rank 0", watched=joined)
        transfer = Transfer.open(plan, transport, self._rank, status, joined)
        if joined is not None:
            status.wait(joined, f"{plan.engines} engine ranks to be ready for handoffs")
        return transfer

    def _invite(self, engines: EngineGroup, status: StatusStore) -> Future[None]:
        """Publish the model's tensors, and make the engines join the store. The future is done when all are ready."""
        status.publish("tensors", [whole_tensor(*tensor) for tensor in self._weights.metadata()])
        info = {
            "address": status.tcp.host,
            "port": status.tcp.port,
            "trainers": self._weights.ranks,
            "timeout_s": self._config.timeout_s,
        }
        return in_background(lambda: engines.init_weight_transfer_engine(info))

    def _publish_plan(self, engines: EngineGroup, status: StatusStore, joined: Future[None]) -> HandoffPlan:
        """Return the plan made from the slices that all engine ranks want. Publish each rank's part of the plan."""
        wants, locations = zip(
            *(
                status.read(f"wants/{index}", f"engine rank {index}", watched=joined)
                for index in range(engines.engines * engines.workers_per_engine)
            ),
            strict=True,
        )
        trainers = [this_location()]
        trainers += [status.read(f"location/{rank}", f"trainer rank {rank}") for rank in range(1, self._weights.ranks)]
        transport = self._config.transport or choose_transport(trainers, locations)
        neighbours = neighbours_of(transport, trainers, locations)
        size = round_bytes(transport, self._config.bucket_bytes)
        plan = make_plan(self._weights.holdings(), wants, len(trainers), size, neighbours)
        busiest, most = plan.bytes_sent().most_common(1)[0]
        log.info(
            "handoff over %s in %d messages; %s sends most, %d bytes",
            *(transport, len(plan.shipments), plan.who(busiest), most),
        )
        for rank in range(plan.trainers + plan.engines):
            status.publish(f"plan/{rank}", (transport, plan.of(rank)))
        return plan

    # -- sending -------------------------------------------------------------------------------------------------

    def _start_receiving(self, engines: EngineGroup) -> Future[None]:
        """Make the engines receive while this rank packs. The future is done when all engines have loaded."""
        info = {"handoff": self._handoffs}

        def receive() -> None:
            engines.start_weight_update()
            engines.update_weights(info)

        return in_background(receive)

    def _compare(self, plan: HandoffPlan, status: StatusStore) -> None:
        """Compare, for each engine rank, the sum of the checksums that it received with the sum of those sent to it.

        Raises:
            HandoffError: the sums differ.
        """
        handoff = self._handoffs
        sent = [status.read(f"sent/{handoff}/{rank}", plan.who(rank)) for rank in range(plan.trainers)]
        for rank in range(plan.trainers, plan.trainers + plan.engines):
            received = status.read(f"received/{handoff}/{rank}", plan.who(rank))
            expected = sum(sums.get(rank, 0) for sums in sent)
            if received != expected:
                raise HandoffError(
                    f"handoff {handoff}: {plan.who(rank)} received slices whose checksums sum up to {received:x}; "
                    f"those that were sent sum up to {expected:x}"
                )
