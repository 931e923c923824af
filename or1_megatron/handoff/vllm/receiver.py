"""Receives the weights of a handoff in a vLLM worker, as a weight-transfer engine that vLLM calls.

``rollout.engine`` starts each handoff. Before, it pauses the requests; afterwards, it drops the prefix cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from or1_megatron.handoff.message.shipment import unpack
from or1_megatron.handoff.message.slices import Slice
from or1_megatron.handoff.transfer import Transfer
from or1_megatron.handoff.transport.links import this_location
from or1_megatron.handoff.transport.status_store import StatusStore, join_store
from or1_megatron.handoff.vllm.direct_copy import DirectCopy
from or1_megatron.handoff.vllm.loader_trace import LoaderTrace, SliceLoader, trace_loaders
from or1_megatron.handoff.vllm.parameter_check import ParameterCheck
from or1_megatron.handoff.vllm.reload import begin_reload, finish_reload, put_back
from or1_megatron.runtime.timeline import join

log = logging.getLogger(__name__)

_NAMED = 8  # tensors that a warning names


@dataclass
class SlicesInitInfo(WeightTransferInitInfo):
    """The address of the trainer's status store, and this engine's index."""

    address: str
    port: int
    trainers: int
    timeout_s: float
    engine_index: int


@dataclass
class SlicesUpdateInfo(WeightTransferUpdateInfo):
    """The number of this handoff on this connection, from 1."""

    handoff: int


class _Connection:
    """A worker's connection to the trainer, with the loaders of the received slices."""

    def __init__(self, transfer: Transfer, model: Any, trace: LoaderTrace) -> None:
        slices = [slot.slice for shipment in transfer.plan.shipments for slot in shipment.slots]
        self.transfer, self._model, self._trace = transfer, model, trace
        self.check = ParameterCheck(model, trace)
        self.direct = DirectCopy(model, trace, slices)
        self._through_loaders: list[Slice] = [part for part in slices if part.name not in self.direct.names]
        self.loader = SliceLoader(trace, self._through_loaders)
        self.handoff = 0

    @torch.no_grad()
    def receive(self, handoff: int) -> int:
        """Receive and load all slices of this rank, and return the sum of their checksums."""
        self.handoff = handoff
        self.direct.begin()
        self.loader = SliceLoader(self._trace, self._through_loaders)
        total = 0
        for shipment, message, last_of_round in self.transfer.receive():
            for received in unpack(shipment, message, handoff):
                total += received.checksum
                self.check.expect(received)
                if received.slice.name in self.direct.names:
                    self.direct.copy(received)
                else:
                    self.loader.take(received)
            if last_of_round:
                self.loader.load(self._model)
        return total


class SlicesWeightTransferEngine(WeightTransferEngine[SlicesInitInfo, SlicesUpdateInfo]):
    """Receives the slices that this worker's loaders ask for, and loads them through vLLM's layerwise reload."""

    init_info_cls = SlicesInitInfo
    update_info_cls = SlicesUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection: _Connection | None = None

    def init_transfer_engine(self, init_info: SlicesInitInfo) -> None:
        """Publish the slices that the loaders ask for, and join the group. Blocks until all ranks have joined."""
        self.shutdown()  # an earlier connection
        index = init_info.engine_index * self.parallel_config.world_size + self.parallel_config.rank
        join(f"engine rank {index}")  # with tensor parallelism the worker is a process of its own
        store = join_store(init_info.address, init_info.port, init_info.timeout_s)
        status = StatusStore(store, f"engine rank {index}", init_info.timeout_s)
        try:
            trace = self._trace_loaders(status)
            status.publish(f"wants/{index}", (trace.wants(), this_location()))
            rank = init_info.trainers + index
            transport, plan = status.read(f"plan/{rank}", "trainer rank 0")
            transfer = Transfer.open(plan, transport, rank, status)
            self._connection = _Connection(transfer, self.model, trace)
        except BaseException as error:
            status.fail(error)
            raise
        log.info("%s: %d tensors are loaded without their loaders", status.who, len(self._connection.direct.names))

    def _trace_loaders(self, status: StatusStore) -> LoaderTrace:
        tensors = status.read("tensors", "trainer rank 0")
        trace = trace_loaders(self.model, self.model_config, tensors)
        if trace.whole:
            reasons = "; ".join(f"'{name}': {reason}" for name, reason in sorted(trace.whole.items())[:_NAMED])
            log.warning("%s: %d tensors come whole, not as slices: %s", status.who, len(trace.whole), reasons)
        return trace

    def start_weight_update(self) -> None:
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights. vLLM's device synchronisation is left out, because transports synchronise themselves."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SlicesUpdateInfo) -> None:
        """Receive and load all of this worker's slices.

        Raises:
            HandoffError: a rank failed or was too slow.
            SliceMismatch: a slice is not what was sent. After either error the model holds old and new weights.
        """
        if self._connection is None:
            raise RuntimeError("weight transfer: update_weights came before init_weight_transfer_engine")
        transfer = self._connection.transfer
        try:
            checksums = self._connection.receive(update_info.handoff)
        except BaseException as error:
            transfer.status.fail(error)
            put_back(self.model, self.model_config)
            raise
        transfer.status.publish(f"received/{update_info.handoff}/{transfer.rank}", checksums)

    def finish_weight_update(self) -> None:
        """Complete the reload and check the parameters. Raises HandoffMismatch, which names the tensor."""
        assert self._connection is not None
        self._connection.direct.check_complete()
        with self._connection.loader as loader:
            finish_reload(self.model, self.model_config)
        loader.check_complete()
        self._connection.check.check(self._connection.handoff)

    def shutdown(self) -> None:
        if self._connection is not None:
            self._connection.transfer.close()
        self._connection = None


def register() -> None:
    """Register the handoff with vLLM's factory in this process, as ``slices``. A second call does nothing."""
    if "slices" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("slices", SlicesWeightTransferEngine)
