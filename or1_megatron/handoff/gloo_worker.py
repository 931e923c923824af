"""The part of our ``gloo`` backend that runs inside vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from or1_megatron.handoff.buckets import plan_buckets
from or1_megatron.handoff.gloo import BACKEND, WireSpec, broadcast, join_store, open_group
from or1_megatron.handoff.reload import finish_reload


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer's store is, how large the group, and which engine this is (filled in by the engine)."""

    address: str
    port: int
    world_size: int
    workers_per_engine: int
    bucket_bytes: int
    timeout_s: float
    engine_index: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What this update brings: WireSpec fields, in the order of sending."""

    tensors: list[tuple[str, str, list[int]]]


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
        self._init_info: GlooInitInfo | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group; blocks until every worker and the trainer have."""
        if init_info.workers_per_engine != self.parallel_config.world_size:
            raise ValueError(
                f"engine {init_info.engine_index} has {self.parallel_config.world_size} workers, the trainer expects "
                f"{init_info.workers_per_engine} per engine"
            )
        rank = 1 + init_info.engine_index * init_info.workers_per_engine + self.parallel_config.rank
        store = join_store(init_info.address, init_info.port, init_info.timeout_s)
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
        if self._group is None or self._init_info is None:
            raise RuntimeError("gloo weight transfer: update_weights came before init_weight_transfer_engine")
        specs = [WireSpec(*fields).spec() for fields in update_info.tensors]
        for bucket in plan_buckets(specs, self._init_info.bucket_bytes):
            # A buffer of its own for every bucket: layerwise reload holds on to tensors until their layer is complete,
            # which may be buckets later.
            buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8)
            broadcast(self._group, buffer).wait()

            def received(bucket: Any = bucket, buffer: torch.Tensor = buffer) -> Iterator[tuple[str, torch.Tensor]]:
                for slot in bucket.slots:
                    yield slot.spec.name, slot.view(buffer)

            self.model.load_weights(received())

    def finish_weight_update(self) -> None:
        finish_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None


def register() -> None:
    """Make the backend known to vLLM's factory in this process; once is enough, twice does no harm."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
