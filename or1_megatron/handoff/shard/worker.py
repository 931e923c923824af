"""The part of our ``shard`` backend that runs inside vLLM's workers."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from or1_megatron.handoff.message.buckets import TensorSpec
from or1_megatron.handoff.message.message import unverified
from or1_megatron.handoff.shard.direct_copy import DirectCopy
from or1_megatron.handoff.shard.plan import HandoffPlan
from or1_megatron.handoff.shard.trainer import BACKEND
from or1_megatron.handoff.shard.transfer import TransferStats, incoming
from or1_megatron.handoff.transport.group import WireSpec, join_store, open_group
from or1_megatron.handoff.transport.links import Links, this_location
from or1_megatron.handoff.transport.status_store import StatusStore, in_background
from or1_megatron.handoff.vllm.loader_trace import LoaderTrace, Part, SliceLoader, trace_loaders
from or1_megatron.handoff.vllm.parameter_check import ParameterCheck
from or1_megatron.handoff.vllm.reload import finish_reload, put_back

log = logging.getLogger(__name__)

_NAMED = 8  # tensors that a warning names


@dataclass
class ShardInitInfo(WeightTransferInitInfo):
    """Where the trainer's board is, how large the group, all tensors of the model, and which engine this is."""

    address: str
    port: int
    trainers: int
    world_size: int
    workers_per_engine: int
    timeout_s: float
    transport: str
    tensors: list[tuple[str, str, list[int]]]
    engine_index: int


@dataclass
class ShardUpdateInfo(WeightTransferUpdateInfo):
    """The number of this handoff on this connection, from 1."""

    handoff: int


class ShardWeightTransferEngine(WeightTransferEngine[ShardInitInfo, ShardUpdateInfo]):
    """Receives the slices that this worker's loaders ask for, and loads them through vLLM's layerwise reload."""

    init_info_cls = ShardInitInfo
    update_info_cls = ShardUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._status: StatusStore | None = None
        self._links: Links | None = None
        self._plan: HandoffPlan | None = None
        self._trace = LoaderTrace()
        self._specs: dict[str, TensorSpec] = {}
        self._direct_copy: DirectCopy | None = None
        self._loader: SliceLoader | None = None
        self._parameter_check: ParameterCheck | None = None
        self._handoff = 0
        self._rank = 0

    def init_transfer_engine(self, init_info: ShardInitInfo) -> None:
        """Record what the loaders ask for, tell the trainer, and join the group; blocks until everyone has."""
        if init_info.workers_per_engine != self.parallel_config.world_size:
            raise ValueError(
                f"engine {init_info.engine_index} has {self.parallel_config.world_size} workers, the trainer expects "
                f"{init_info.workers_per_engine} per engine"
            )
        self.shutdown()  # of an earlier connection
        index = init_info.engine_index * init_info.workers_per_engine + self.parallel_config.rank
        self._rank = init_info.trainers + index
        store = join_store(init_info.address, init_info.port, init_info.timeout_s)
        status = StatusStore(store, f"engine rank {index}", init_info.timeout_s)
        try:
            specs = [WireSpec(*fields).spec() for fields in init_info.tensors]
            self._specs = {spec.name: spec for spec in specs}
            self._trace = trace_loaders(self.model, self.model_config, specs)
            self._parameter_check = ParameterCheck(self.model, self._trace)
            if whole := self._trace.whole:
                reasons = "; ".join(f"'{name}': {reason}" for name, reason in sorted(whole.items())[:_NAMED])
                log.warning("engine rank %d: %d tensors come whole, not as slices: %s", index, len(whole), reasons)
            status.publish(f"wants/{index}", (self._trace.wants(specs), this_location()))
            self._plan = status.read(f"plan/{self._rank}", "trainer rank 0")
            cuts = (slot.spec for shipment in self._plan.shipments for slot in shipment.bucket.slots)
            self._direct_copy = DirectCopy(self.model, self._trace, cuts)
            log.info("engine rank %d: %d tensors are loaded without their loaders", index, len(self._direct_copy.names))
            opened = in_background(
                lambda: open_group(store, init_info.address, self._rank, init_info.world_size, init_info.timeout_s)
            )
            group = status.wait(opened, f"{init_info.world_size} ranks to form a group")
            self._links = Links.open(
                init_info.transport,
                group,
                store,
                self._rank,
                init_info.world_size,
                init_info.trainers,
                init_info.timeout_s,
            )
        except BaseException as error:
            status.fail(error)
            raise
        self._status = status

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        if self._direct_copy is not None:
            self._direct_copy.begin()
            self._loader = SliceLoader(self._trace, self._direct_copy.names)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base, which ends by synchronising an accelerator: transports do that with every message."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShardUpdateInfo) -> None:
        """Receive and load all of this worker's shipments.

        Raises:
            HandoffError: somebody failed or did not keep up.
            SliceMismatch: a slice is not what was sent. In either case the model is a mixture.
        """
        if self._status is None or self._plan is None or self._links is None or self._loader is None:
            raise RuntimeError("shard weight transfer: update_weights came before init_weight_transfer_engine")
        try:
            stats = self._receive(self._status, self._plan, self._links, self._loader, update_info.handoff)
        except BaseException as error:
            self._status.fail(error)
            put_back(self.model, self.model_config)
            raise
        self._status.publish(f"received/{update_info.handoff}/{self._rank}", stats)

    @torch.no_grad()
    def _receive(
        self, status: StatusStore, plan: HandoffPlan, links: Links, loader: SliceLoader, handoff: int
    ) -> TransferStats:
        assert self._parameter_check is not None and self._direct_copy is not None
        self._handoff = handoff
        missing = defaultdict[str, int](int)
        for shipment in plan.shipments:
            for slot in shipment.bucket.slots:
                missing[slot.spec.name] += 1
        parts: dict[str, list[Part]] = defaultdict(list)
        complete: list[tuple[TensorSpec, list[Part]]] = []
        before, total = links.counts(), 0
        for shipment, message, last_of_round in incoming(plan, self._rank, links, status):
            for each in unverified(shipment, message, handoff):
                cut = each.cut
                total += each.checksum
                self._parameter_check.expect(each)
                if cut.name in self._direct_copy.names:
                    self._direct_copy.put(each)
                    continue
                parts[cut.name].append(Part(cut.box, each.values, each.verify))
                missing[cut.name] -= 1
                if not missing[cut.name]:
                    complete.append((self._specs[cut.name], parts.pop(cut.name)))
            if last_of_round:  # not for every message: vLLM looks through all of its modules each time
                if complete:
                    with loader:
                        self.model.load_weights((spec.name, loader.offer(spec, boxes)) for spec, boxes in complete)
                    complete.clear()
                del each
                loader.keep_copies(parts)  # the messages' memory is about to be used again
        links.rest()
        sent, received = (now - then for now, then in zip(links.counts(), before, strict=True))
        return TransferStats(sent, received, {self._rank: total})

    def finish_weight_update(self) -> None:
        assert self._loader is not None and self._parameter_check is not None and self._direct_copy is not None
        self._direct_copy.check_complete()
        with self._loader:
            finish_reload(self.model, self.model_config)
        self._loader.check_complete()
        self._loader = None
        self._parameter_check.check(self._handoff)

    def shutdown(self) -> None:
        if self._links is not None:
            self._links.close()
        self._status, self._links, self._plan = None, None, None


def register() -> None:
    """Make the backend known to vLLM's factory in this process; once is enough, twice does no harm."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ShardWeightTransferEngine)
