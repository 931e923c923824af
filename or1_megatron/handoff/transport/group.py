"""The process group of our ``gloo`` transfer backend, and what its two ends tell each other.

Rank 0 is the trainer's rank 0; the engines' workers follow, engine by engine. The group stands beside the trainer's
default group (Megatron's) and beside vLLM's own groups: it is built from a store of its own and registered nowhere.

    trainer (gloo_trainer)                         worker (gloo_worker)
    host a store on a free port
    init_weight_transfer_engine(GlooInitInfo) ───▶ join the store, form the group
    each handoff: update_weights(GlooUpdateInfo)─▶ plan the same buckets, receive each, compare its checksums,
                  broadcast bucket by bucket       load its tensors
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from or1_megatron.handoff.message.buckets import Slice, TensorSpec, plan_buckets
from or1_megatron.handoff.message.message import Shipment
from or1_megatron.weights.holdings import whole

BACKEND = "gloo"
TRAINER_RANK = 0
FAILED = "failed"  # in the store: why the trainer broke the handoff off

_abandoned: list[ProcessGroupGloo] = []


def open_store(address: str, timeout_s: float) -> TCPStore:
    """A store on a free port of this host, which ``address`` must name."""
    return TCPStore(address, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(address: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def open_group(store: TCPStore, address: str, rank: int, world_size: int, timeout_s: float) -> ProcessGroupGloo:
    """Form the group; blocks until all ranks are here. ``address`` is the trainer's, as this process reaches it.

    gloo would otherwise listen on whatever the host name resolves to, which in a container may be nothing.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(address))]
    return ProcessGroupGloo(PrefixStore("or1-handoff", store), rank, world_size, options)


def broadcast(group: ProcessGroupGloo, tensor: torch.Tensor) -> torch.distributed.Work:
    """Send (on the trainer's rank) or receive ``tensor`` [n] uint8 on CPU; asynchronous."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = TRAINER_RANK
    options.rootTensor = 0
    return group.broadcast([tensor], options)  # type: ignore[attr-defined]  # as above


def abandon(group: ProcessGroupGloo | None) -> None:
    """Have done with a group in which a transfer may be under way: to destroy it would be to wait for that."""
    if group is not None:
        _abandoned.append(group)


def whole_tensors(specs: list[TensorSpec], bucket_bytes: int) -> list[Shipment]:
    """What is broadcast, bucket by bucket; both ends make the same list."""
    buckets = plan_buckets([Slice(spec.name, whole(spec.shape), spec.dtype) for spec in specs], bucket_bytes)
    return [Shipment(number, number, TRAINER_RANK, (), (), bucket) for number, bucket in enumerate(buckets)]


def _own_address(peer: str) -> str:
    """This host's address on the route to ``peer``; no packet is sent."""
    family, kind, proto, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


@dataclass
class WireSpec:
    """A TensorSpec in types that every serialisation knows."""

    name: str
    dtype: str
    shape: list[int]

    @classmethod
    def of(cls, spec: TensorSpec) -> WireSpec:
        return cls(spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape))

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, getattr(torch, self.dtype), tuple(self.shape))
