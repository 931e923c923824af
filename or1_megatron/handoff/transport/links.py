"""Opens the transports that ``handoff.transport`` names, and finds where a rank runs (node, GPU).

gloo                 CPU, any nodes
shared_memory        CPU, one node
gloo+shared_memory   CPU, two hops: gloo among trainer ranks, shared memory to the engines beside them
nccl                 GPU, engines on devices of their own
cuda_ipc             GPU, one node
nccl+cuda_ipc        GPU, two hops: NCCL among trainer ranks, CUDA IPC to the engines on their devices
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroupGloo, Store

from or1_megatron.handoff.transport.base import GlooTransport, Transport
from or1_megatron.handoff.transport.shared_memory import HostSharedMemory, SharedMemoryTransport


@dataclass(frozen=True, slots=True)
class Location:
    """The node and the GPU on which a rank runs."""

    node: str
    """An id that is equal for processes that can map each other's memory."""
    device: str
    """A GPU's UUID; empty on CPU."""


def this_location() -> Location:
    """Return where the calling process runs, with its current GPU."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    device = ""
    if torch.cuda.is_available():
        device = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return Location(node, device)


class Links:
    """The transports between a rank and all other ranks of a handoff."""

    def __init__(self, network: Transport, local: Transport | None, trainers: int) -> None:
        """``local``: the transport from trainer ranks to engine ranks; None: ``network`` serves these ranks too."""
        self._network, self._local, self._trainers = network, local or network, trainers

    @classmethod
    def open(
        cls, name: str, group: ProcessGroupGloo, store: Store, rank: int, world: int, trainers: int, timeout_s: float
    ) -> Links:
        """Open the transports of ``handoff.transport = name``. ``group`` contains all trainer and engine ranks."""

        def made(kind: str) -> Transport:
            if kind == "gloo":
                return GlooTransport(group, timeout_s)
            if kind == "shared_memory":
                return SharedMemoryTransport(group, HostSharedMemory(), timeout_s)
            from or1_megatron.handoff.transport.gpu import CudaSharedMemory, NcclTransport

            if kind == "cuda_ipc":
                return SharedMemoryTransport(group, CudaSharedMemory(), timeout_s)
            return NcclTransport(store, rank, world, timeout_s)

        network, _, local = name.partition("+")
        return cls(made(network), made(local) if local else None, trainers)

    @property
    def all(self) -> set[Transport]:
        return {self._network, self._local}

    def between(self, sender: int, receiver: int) -> Transport:
        return self._local if sender < self._trainers <= receiver else self._network

    def free_buffers(self) -> None:
        for link in self.all:
            link.free_buffers()

    def close(self) -> None:
        for link in self.all:
            link.close()
