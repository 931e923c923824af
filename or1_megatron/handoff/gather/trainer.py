"""The trainer's end of our ``gloo`` backend. Imported on the sending rank alone: vllm takes seconds to import."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from or1_megatron.handoff.errors import HandoffError
from or1_megatron.handoff.message.buckets import Slice, TensorSpec
from or1_megatron.handoff.message.message import message_bytes, pack
from or1_megatron.handoff.transport.group import (
    BACKEND,
    FAILED,
    TRAINER_RANK,
    WireSpec,
    abandon,
    broadcast,
    open_group,
    open_store,
    whole_tensors,
)

T = TypeVar("T")

_POLL_S = 0.0005
_BLAME_S = 5.0  # after a broken transfer: how long to wait for the engines' own account of it


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Rank 0's address as the engines reach it, the group's shape, the wire's parameters."""

    backend: ClassVar[str] = BACKEND

    address: str
    engines: int
    workers_per_engine: int
    bucket_bytes: int
    timeout_s: float


class GlooTrainerEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Rank 0: gathers tensor after tensor from its source, fills buckets, broadcasts them to all workers."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        info: GlooTrainerInitInfo,
        store: TCPStore,
        group: ProcessGroupGloo,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=True)
        self._source = source
        self._info = info
        self._store = store  # its server lives as long as this object
        self._group: ProcessGroupGloo | None = group
        self._handoffs = 0
        self.bytes_sent = 0
        """Of the last ``send_weights``: payload, once, however many workers received it."""

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Meet every worker of every engine.

        Raises:
            HandoffError: an engine reported an error, or not all were there after ``timeout_s``.
        """
        if source is None:
            raise ValueError("the gloo backend sends whole models: trainer_init needs a WeightSource")
        if not init_info.is_sender:
            raise ValueError(f"the gloo backend has one sender, trainer rank 0; this is rank {init_info.rank}")
        store = open_store(init_info.address, init_info.timeout_s)
        world_size = 1 + init_info.engines * init_info.workers_per_engine
        payload = {
            "address": init_info.address,
            "port": store.port,
            "world_size": world_size,
            "workers_per_engine": init_info.workers_per_engine,
            "bucket_bytes": init_info.bucket_bytes,
            "timeout_s": init_info.timeout_s,
            "tensors": _on_the_wire(source),
        }
        joined = _in_background(lambda: client.init_weight_transfer_engine(payload))
        opened = _in_background(
            lambda: open_group(store, init_info.address, TRAINER_RANK, world_size, init_info.timeout_s)
        )
        who = f"{init_info.engines} engines to join the transfer group at {init_info.address}:{store.port}"
        group = _await(opened, joined, init_info.timeout_s, who)
        _await(joined, joined, init_info.timeout_s, who)
        return cls(client=client, source=source, info=init_info, store=store, group=group)

    def send_weights(self) -> None:
        """One whole update, start to finish.

        Raises:
            HandoffError: an engine reported an error, or did not keep up within ``timeout_s``.
            ValueError: the source's tensors are not what its metadata says.
        """
        if self._group is None:
            raise RuntimeError("send_weights after shutdown")
        self._handoffs += 1
        self.bytes_sent = 0
        tensors = iter(self._source)
        try:
            self.client.start_weight_update()
            receiving = _in_background(lambda: self.client.update_weights({"handoff": self._handoffs}))
            self._broadcast_all(self._group, tensors, receiving)
        except BaseException as error:
            self._break_off(error)
            for _ in tensors:  # the other trainer ranks iterate with this one, and shall come to their end
                pass
            raise
        _await(receiving, receiving, self._info.timeout_s, f"{self._info.engines} engines to load the weights")
        self.client.finish_weight_update()

    def _break_off(self, error: BaseException) -> None:
        """Tell the engines, some of which may be waiting for the next bucket."""
        self._store.set(FAILED, str(error))
        abandon(self._group)
        self._group = None

    def _broadcast_all(
        self, group: ProcessGroupGloo, tensors: Iterator[tuple[str, torch.Tensor]], receiving: Future[None]
    ) -> None:
        specs = [WireSpec(*fields).spec() for fields in _on_the_wire(self._source)]
        for shipment in whole_tensors(specs, self._info.bucket_bytes):
            buffer = torch.empty(message_bytes(shipment), dtype=torch.uint8)
            slots = shipment.bucket.slots
            pack(shipment, buffer, lambda spec: _next_tensor(tensors, spec), self._handoffs)
            self._finish_broadcast(broadcast(group, buffer), receiving, slots[-1].spec.name)
            self.bytes_sent += buffer.numel()
        if (extra := next(tensors, None)) is not None:
            raise ValueError(f"weights: '{extra[0]}' came after the last tensor that metadata() declares")

    def _finish_broadcast(self, work: torch.distributed.Work, receiving: Future[None], last: str) -> None:
        """Wait for one bucket, with an eye on the engines: one that has failed will never take the rest."""
        deadline = time.monotonic() + self._info.timeout_s
        while not work.is_completed():
            if receiving.done() and (error := receiving.exception()) is not None:
                raise HandoffError(f"handoff broke off before '{last}' was through: {error}") from error
            if time.monotonic() > deadline:
                raise HandoffError(
                    f"handoff: {self._info.engines} engines did not take the bucket that ends with '{last}' within "
                    f"timeout_s = {self._info.timeout_s:g}"
                )
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as transport_error:
            try:
                receiving.result(timeout=_BLAME_S)
            except Exception as error:
                raise HandoffError(f"handoff broke off before '{last}' was through: {error}") from error
            raise HandoffError(f"handoff broke off before '{last}' was through: {transport_error}") from transport_error

    def shutdown(self) -> None:
        self._group = None


def _on_the_wire(source: WeightSource) -> list[tuple[str, str, list[int]]]:
    """WireSpec fields of all tensors, in the order of sending."""
    specs = [TensorSpec(meta.name, meta.dtype, tuple(meta.shape)) for meta in source.metadata()]
    return [astuple(WireSpec.of(spec)) for spec in specs]


def _next_tensor(tensors: Iterator[tuple[str, torch.Tensor]], spec: TensorSpec | Slice) -> torch.Tensor:
    """The source's next tensor, which must be what the workers were told to expect."""
    item = next(tensors, None)
    if item is None:
        raise ValueError(f"weights: iteration ended before '{spec.name}', which metadata() declares")
    name, tensor = item
    if name != spec.name or tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise ValueError(
            f"weights: metadata() declares '{spec.name}' {spec.dtype} {spec.shape}, iteration yields '{name}' "
            f"{tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor


def _in_background(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` on a daemon thread: one that hangs must not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # belongs to whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name="handoff", daemon=True).start()
    return future


def _await(wanted: Future[T], watched: Future[Any], timeout_s: float, who: str) -> T:
    """The result of ``wanted``; an error of ``watched`` meanwhile is final, and so is the deadline."""
    deadline = time.monotonic() + timeout_s
    while not wanted.done():
        if watched.done() and (error := watched.exception()) is not None:
            raise HandoffError(f"handoff: waiting for {who}: {error}") from error
        if time.monotonic() > deadline:
            raise HandoffError(f"handoff: waited timeout_s = {timeout_s:g} for {who}")
        time.sleep(_POLL_S)
    try:
        return wanted.result()
    except Exception as error:
        raise HandoffError(f"handoff: waiting for {who}: {error}") from error


def register() -> None:
    """Make the backend known to vLLM's trainer factory in this process."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerEngine)
