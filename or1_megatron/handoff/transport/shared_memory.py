"""The transport over shared memory: the receiver maps the memory into which the sender has packed a message.

The sender's notice (which memory, how many bytes) and the receiver's acknowledgement go over gloo; the weights are not
sent. The memory is host memory (``HostSharedMemory``), or device memory over CUDA IPC (``gpu.CudaSharedMemory``).
"""

from __future__ import annotations

import mmap
import os
import pickle
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from or1_megatron.handoff.failures import HandoffError
from or1_megatron.handoff.transport.base import Arrival, Transport, Work, abort, nothing

if TYPE_CHECKING:
    from or1_megatron.handoff.transport.gpu import CudaSharedMemory

_NOTICE_BYTES = 2048


class HostSharedMemory:
    """Allocates and maps nameless host memory (memfd), which is freed when the last process that maps it ends."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}  # by address
        self._mapped: dict[tuple[int, int], Tensor] = {}

    def allocate(self, size_bytes: int) -> Tensor:
        descriptor = os.memfd_create("or1-handoff", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        buffer = torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
        self._descriptors[buffer.data_ptr()] = descriptor
        return buffer

    def describe(self, buffer: Tensor) -> Any:
        """Return a picklable description, from which the method ``map`` in another process makes the same memory."""
        return os.getpid(), self._descriptors[buffer.data_ptr()]

    def map(self, description: Any) -> Tensor:
        """Return the described memory, mapped into this process. Raises HandoffError when it cannot be mapped."""
        if (known := self._mapped.get(description)) is not None:
            return known
        pid, descriptor = description
        try:
            with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
                pages = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            raise HandoffError(
                f"handoff: cannot map the memory of process {pid} ({error}); shared memory needs trainer and engines "
                "on one node, under one user and in one PID namespace; handoff.transport = gloo does not"
            ) from error
        return self._mapped.setdefault(description, pages)

    def finish_reading(self) -> None:
        """Do nothing, because operations on host memory are complete when they return."""

    def free(self) -> None:
        """Free all memory that was allocated or mapped."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._mapped.clear()


class SharedMemoryTransport(Transport):
    """``Transport`` on one node: any number of receivers read the bytes where the sender has packed them."""

    def __init__(self, group: ProcessGroupGloo, memory: HostSharedMemory | CudaSharedMemory, timeout_s: float) -> None:
        """``group``: contains all ranks and carries notices and acknowledgements."""
        super().__init__(timeout_s, lambda: abort(group))
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = group  # send and recv are absent from torch's stub
        self._memory = memory

    def allocate(self, size_bytes: int) -> Tensor:
        return self._memory.allocate(size_bytes)

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        raw = pickle.dumps((self._memory.describe(buffer), buffer.numel()))
        assert len(raw) <= _NOTICE_BYTES
        notice = torch.frombuffer(bytearray(raw.ljust(_NOTICE_BYTES, b"\0")), dtype=torch.uint8)
        answer, answers = torch.empty(1, dtype=torch.uint8), list[Work]()

        def start() -> Work:
            answers.append(self._group.recv([answer], destination, number))
            return self._group.send([notice], destination, number)

        def taken() -> None:
            answers[0].wait(self._timeout)

        return self._threads.follow(start, taken)

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        assert into is None, "only networks bring what is passed on"
        notice = torch.empty(_NOTICE_BYTES, dtype=torch.uint8)

        def release() -> None:
            self._memory.finish_reading()
            answer = torch.zeros(1, dtype=torch.uint8)
            self._threads.follow(lambda: self._group.send([answer], source, number), nothing)

        def arrived() -> Arrival:
            description, announced = pickle.loads(notice.numpy().tobytes())
            if announced != size_bytes:
                raise HandoffError(f"handoff: rank {source} sent {announced} bytes, {size_bytes} were expected")
            return Arrival(self._memory.map(description)[:size_bytes], release)

        return self._threads.follow(lambda: self._group.recv([notice], source, number), arrived)

    def free_buffers(self) -> None:
        self._memory.free()
