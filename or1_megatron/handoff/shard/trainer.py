"""A trainer rank's end of the ``shard`` backend, without vllm.

    rank 0                        other trainer ranks             engine ranks (shard/worker.py)
    host the status store ──────▶ join it            ──────────▶ join it
    publish the tensors ────────────────────────────────────────▶ run the loaders on placeholders, publish their wants
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

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.errors import HandoffError, failing_together
from or1_megatron.handoff.message.buckets import whole_tensor
from or1_megatron.handoff.shard.plan import make_plan
from or1_megatron.handoff.shard.routes import choose_transport, round_bytes, routes_for
from or1_megatron.handoff.shard.transfer import Transfer, TransferStats
from or1_megatron.handoff.transport.group import join_store, open_store
from or1_megatron.handoff.transport.links import this_location
from or1_megatron.handoff.transport.status_store import StatusStore, in_background
from or1_megatron.interfaces import EngineControl, PolicyWeights
from or1_megatron.weights.holdings import Box, Holding

log = logging.getLogger(__name__)

Read = Callable[[str, Box], Tensor]
"""Returns a rectangle of a tensor that this rank holds."""


class ShardTrainer:
    """``sender.WeightSender``: every rank sends the slices that it holds."""

    whole_tensors = False
    """Whether the engines ask for every tensor whole, instead of the slices that their loaders copy."""

    def __init__(self, weights: PolicyWeights, rank: int, config: HandoffConfig, engines: EngineControl | None) -> None:
        """``engines``: on rank 0 only."""
        self._weights, self._rank, self._config, self._engines = weights, rank, config, engines
        self._senders = weights.ranks
        self._transport = config.transport
        self._status: StatusStore | None = None
        self._transfer: Transfer | None = None
        self._handoffs = 0
        self.stats: list[TransferStats] = []
        """On rank 0: of all trainer ranks, then all engine ranks, in the last handoff."""

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "not connected"
        return self._transfer

    def send(self, version: int) -> int:
        """Bring every engine to ``version``; meets the engines if that has not been done.

        Returns the bytes that all trainer ranks sent; on other ranks than 0 those that this rank sent.
        """
        with failing_together(self._weights, self.close), self._reading() as read:
            if self._rank >= self._senders:
                return 0
            try:
                self._transfer = transfer = self._transfer or self._connect()
                self._handoffs += 1
                receiving = None if self._engines is None else self._start_receiving(self._engines)
                stats = transfer.send(read, self._handoffs, receiving)
                transfer.status.publish(f"sent/{self._handoffs}/{self._rank}", stats)
                if self._engines is None or receiving is None:
                    return stats.bytes_sent
                transfer.status.wait(receiving, f"{self._engines.engines} engines to load the weights")
                self._compare(transfer)
                self._engines.finish_weight_update(version)
                return sum(each.bytes_sent for each in self.stats[: self._senders])
            except BaseException as error:
                if self._status is not None:
                    self._status.fail(error)
                raise

    def close(self) -> None:
        """Leave the engines; the next handoff meets them anew.

        The status store stays until then, so that other ranks can read what has failed.
        """
        if self._transfer is not None:
            self._transfer.close()
        self._transfer, self._handoffs = None, 0

    def _reading(self) -> AbstractContextManager[Read]:
        """Open, for one handoff, the function with which this rank reads what it sends."""
        return nullcontext(self._weights.read)

    def _holdings(self) -> list[Holding]:
        return self._weights.holdings()

    # -- meeting -------------------------------------------------------------------------------------------------

    def _connect(self) -> Transfer:
        """Meet the engines and make the plan.

        Raises:
            HandoffError: a rank failed, or did not come within ``timeout_s``.
        """
        timeout_s, place, store = self._config.timeout_s, None, None
        if self._engines is not None:
            store = open_store(self._engines.address, timeout_s)
            place = (store.host, store.port)
        address, port = place if self._senders == 1 and place else self._weights.from_rank_0(place)
        store = store or join_store(address, port, timeout_s)
        self._status = status = StatusStore(store, f"trainer rank {self._rank}", timeout_s)
        joined: Future[None] | None = None
        if self._engines is not None:
            joined = self._invite(self._engines, status)
            self._publish_plan(self._engines, status, joined)
        else:
            status.publish(f"location/{self._rank}", this_location())
        transport, plan = status.read(f"plan/{self._rank}", "trainer rank 0", watched=joined)
        transfer = Transfer.open(plan, transport, self._rank, status, joined)
        if joined is not None:
            status.wait(joined, f"{plan.engines} engine ranks to be ready for handoffs")
        return transfer

    def _invite(self, engines: EngineControl, status: StatusStore) -> Future[None]:
        """Tell the engines where to meet; done when all are ready for handoffs."""
        status.publish("tensors", [whole_tensor(*each) for each in self._weights.metadata()])
        info = {
            "address": status.tcp.host,
            "port": status.tcp.port,
            "trainers": self._senders,
            "workers_per_engine": engines.workers_per_engine,
            "timeout_s": self._config.timeout_s,
            "whole_tensors": self.whole_tensors,
        }
        return in_background(lambda: engines.init_weight_transfer_engine(info))

    def _publish_plan(self, engines: EngineControl, status: StatusStore, joined: Future[None]) -> None:
        """Publish each rank's part of the plan, made from the wants of all engine ranks."""
        told = [
            status.read(f"wants/{index}", f"engine rank {index}", keep=False, watched=joined)
            for index in range(engines.engines * engines.workers_per_engine)
        ]
        others = [
            status.read(f"location/{rank}", f"trainer rank {rank}", keep=False) for rank in range(1, self._senders)
        ]
        trainers, wants, locations = [this_location(), *others], [want for want, _ in told], [at for _, at in told]
        transport = self._transport or choose_transport(trainers, locations)
        log.info("handoff over %s", transport)
        routes = routes_for(transport, trainers, locations)
        size = round_bytes(transport, self._config.bucket_bytes)
        plan = make_plan(self._holdings(), wants, self._senders, size, routes)
        for rank in range(plan.trainers + plan.engines):
            status.publish(f"plan/{rank}", (transport, plan.of(rank)))

    # -- sending -------------------------------------------------------------------------------------------------

    def _start_receiving(self, engines: EngineControl) -> Future[None]:
        """Have the engines receive; what this rank packs first can wait for them."""
        info = {"handoff": self._handoffs}

        def receive() -> None:
            engines.start_weight_update()
            engines.update_weights(info)

        return in_background(receive)

    def _compare(self, transfer: Transfer) -> None:
        """Compare what the engine ranks say they received with what the trainer ranks say they sent.

        Raises:
            HandoffError: they differ.
        """
        plan, status, handoff = transfer.plan, transfer.status, self._handoffs
        self.stats = [
            status.read(f"sent/{handoff}/{rank}", plan.who(rank), keep=False) for rank in range(plan.trainers)
        ]
        for rank in range(plan.trainers, plan.trainers + plan.engines):
            received = status.read(f"received/{handoff}/{rank}", plan.who(rank), keep=False)
            expected = sum(each.checksums.get(rank, 0) for each in self.stats[: plan.trainers])
            if received.checksums.get(rank, 0) != expected:
                raise HandoffError(
                    f"handoff {handoff}: {plan.who(rank)} received slices whose checksums sum up to "
                    f"{received.checksums.get(rank, 0):x}; those that were sent sum up to {expected:x}"
                )
            self.stats.append(received)
        sent = sum(each.bytes_sent for each in self.stats)
        received_bytes = sum(each.bytes_received for each in self.stats)
        if sent != received_bytes:
            raise HandoffError(f"handoff {handoff}: {sent} bytes were sent, {received_bytes} received")
