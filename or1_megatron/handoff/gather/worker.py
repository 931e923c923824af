"""The part of our ``gloo`` backend that runs inside vLLM's workers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from or1_megatron.handoff.errors import HandoffError
from or1_megatron.handoff.message.buckets import Slice, TensorSpec
from or1_megatron.handoff.message.message import message_bytes, unpack
from or1_megatron.handoff.transport.group import (
    BACKEND,
    FAILED,
    WireSpec,
    abandon,
    broadcast,
    join_store,
    open_group,
    whole_tensors,
)
from or1_megatron.handoff.vllm.loader_trace import trace_loaders
from or1_megatron.handoff.vllm.parameter_check import ParameterCheck
from or1_megatron.handoff.vllm.reload import finish_reload, put_back

_POLL_S = 0.0005
_LOOK_S = 0.2  # how often a wait looks whether the trainer has given up


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer's store is, how large the group, what each handoff brings (WireSpec fields, in the order of
    sending), and which engine this is (filled in by the engine)."""

    address: str
    port: int
    world_size: int
    workers_per_engine: int
    bucket_bytes: int
    timeout_s: float
    tensors: list[tuple[str, str, list[int]]]
    engine_index: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The number of this handoff on this connection, from 1."""

    handoff: int


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives whole tensors in HF names and loads them through vLLM's layerwise reload.

    Layerwise reload, because the processed weights are not the loaded ones: on CPU oneDNN has prepacked the linears,
    elsewhere quantisation or layout changes may have happened.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: ProcessGroupGloo | None = None
        self._store: TCPStore | None = None
        self._init_info: GlooInitInfo | None = None
        self._specs: list[TensorSpec] = []
        self._parameter_check: ParameterCheck | None = None
        self._handoff = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group; blocks until every worker and the trainer have."""
        if init_info.workers_per_engine != self.parallel_config.world_size:
            raise ValueError(
                f"engine {init_info.engine_index} has {self.parallel_config.world_size} workers, the trainer expects "
                f"{init_info.workers_per_engine} per engine"
            )
        self.shutdown()  # of an earlier connection
        self._specs = [WireSpec(*fields).spec() for fields in init_info.tensors]
        self._parameter_check = ParameterCheck(self.model, trace_loaders(self.model, self.model_config, self._specs))
        rank = 1 + init_info.engine_index * init_info.workers_per_engine + self.parallel_config.rank
        store = join_store(init_info.address, init_info.port, init_info.timeout_s)
        self._store = store
        self._group = open_group(store, init_info.address, rank, init_info.world_size, init_info.timeout_s)
        self._init_info = init_info

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base, which ends by synchronising an accelerator: only where there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load all tensors.

        Raises:
            SliceMismatch: a tensor is not what was sent.
            HandoffError: the trainer is gone, has broken off or did not keep up. In either case the model is a mixture.
        """
        if self._group is None or self._init_info is None or self._parameter_check is None:
            raise RuntimeError("gloo weight transfer: update_weights came before init_weight_transfer_engine")
        self._handoff = update_info.handoff
        try:
            for shipment in whole_tensors(self._specs, self._init_info.bucket_bytes):
                # A buffer of its own for every bucket: layerwise reload holds on to tensors until their layer is
                # complete, which may be buckets later.
                message = torch.empty(message_bytes(shipment), dtype=torch.uint8)
                self._wait(broadcast(self._group, message), shipment.bucket.slots[0].spec)
                slices = unpack(shipment, message, self._handoff)
                for each in slices:
                    self._parameter_check.expect(each)
                self.model.load_weights((each.cut.name, each.values) for each in slices)
        except BaseException:
            abandon(self._group)
            self._group = None
            put_back(self.model, self.model_config)
            raise

    def _wait(self, work: torch.distributed.Work, first: Slice) -> None:
        """Until the bucket that begins with ``first`` is here; with an eye on the trainer, which may have given up."""
        assert self._store is not None and self._init_info is not None
        deadline, looked = time.monotonic() + self._init_info.timeout_s, time.monotonic()
        while not work.is_completed():
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                try:
                    failed = self._store.get(FAILED).decode() if self._store.check([FAILED]) else None
                except (DistNetworkError, DistStoreError) as error:
                    raise HandoffError(f"handoff: trainer rank 0 is gone; {first} was waited for") from error
                if failed is not None:
                    raise HandoffError(f"handoff: broken off before {first} came: {failed}")
            if time.monotonic() > deadline:
                raise HandoffError(f"handoff: {first} did not come within {self._init_info.timeout_s:g} s")
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise HandoffError(f"handoff: {first} did not come: {error}") from error

    def finish_weight_update(self) -> None:
        """Complete the model, and read what it holds. Raises HandoffMismatch, naming the tensor."""
        assert self._parameter_check is not None
        finish_reload(self.model, self.model_config)
        self._parameter_check.check(self._handoff)

    def shutdown(self) -> None:
        self._group, self._store = None, None


def register() -> None:
    """Make the backend known to vLLM's factory in this process; once is enough, twice does no harm."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
