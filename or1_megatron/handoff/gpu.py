"""The transports of GPU clusters: NCCL point to point, and CUDA IPC. Written with care, and so far not run on a GPU.

What to look at first when they are (``benchmarks/gpu/handoff.py``, ``tests/gpu/test_handoff_gpu.py``):

- A pair of ranks gets a communicator of its own at its first message, some tens of MiB of device memory each.
- NCCL's kernels wait on the device. Every rank starts them in the plan's order, so that none waits for one behind it,
  also where CUDA_DEVICE_MAX_CONNECTIONS=1 leaves a single queue.
- CUDA IPC exports whole blocks of torch's caching allocator: ``expandable_segments`` must be off.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.multiprocessing.reductions import reduce_tensor

from or1_megatron.handoff.gloo import HandoffError
from or1_megatron.handoff.wire import Arrival, Buffers, Waiters, Work

T = TypeVar("T")


def on_device(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


class _Finished:
    """A work of NCCL's, waited for on the host: its own wait() only orders streams."""

    def __init__(self, work: Any, device: int) -> None:
        self._work, self._device = work, device

    def wait(self, timeout: timedelta) -> None:
        torch.cuda.set_device(self._device)  # of this thread
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._work.wait(timeout)
        stream.synchronize()


class NcclTransport:
    """``Transport`` between GPUs, each of another rank. Memory is the device's."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = ProcessGroupNCCL(PrefixStore("or1-handoff-nccl", store), rank, world, options)
        self._device = torch.cuda.current_device()
        self._waiters = Waiters(timeout_s, self._group.abort)
        self._buffers = Buffers(on_device)
        self.bytes_sent = self.bytes_received = 0

    def allocate(self, size_bytes: int) -> Tensor:
        return on_device(size_bytes)

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        def sent() -> None:
            self.bytes_sent += buffer.numel()

        # NCCL has no tags: between two ranks the order of starting is the order of the plan
        return self._follow(lambda: self._group.send([buffer], destination, 0), sent)

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        owner = self._buffers.take(size_bytes) if into is None else into
        message = owner[:size_bytes]

        def release() -> None:
            if into is None:
                torch.cuda.current_stream().synchronize()  # the loaders' copies; then NCCL may write here again
                self._buffers.give(owner)

        def arrived() -> Arrival:
            self.bytes_received += size_bytes
            return Arrival(message, release)

        return self._follow(lambda: self._group.recv([message], source, 0), arrived)

    def _follow(self, start: Callable[[], Any], then: Callable[[], T]) -> Future[T]:
        def work() -> Work:
            return _Finished(start(), self._device)

        return self._waiters.follow(work, then)

    def rest(self) -> None:
        self._buffers.clear()

    def close(self) -> None:
        self._waiters.close()
        self.rest()


class CudaIpc:
    """``mapped.Sharing`` of device memory."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def allocate(self, size_bytes: int) -> Tensor:
        return on_device(size_bytes)

    def describe(self, buffer: Tensor) -> Any:
        torch.cuda.current_stream().synchronize()  # what was packed is there for other processes to see
        return reduce_tensor(buffer)

    def map(self, description: Any) -> Tensor:
        rebuild, arguments = description
        torch.cuda.set_device(self._device)  # of a waiting thread
        try:
            return rebuild(*arguments)
        except RuntimeError as error:
            raise HandoffError(
                f"handoff: cannot map another process's device memory ({error}); CUDA IPC needs both on one node, GPUs "
                "that are peers, and PYTORCH_CUDA_ALLOC_CONF without expandable_segments"
            ) from error

    def finished_reading(self) -> None:
        torch.cuda.current_stream().synchronize()

    def rest(self) -> None:
        """What was mapped goes with the tensors; the sender's allocator is told that it may have its blocks back."""
        torch.cuda.ipc_collect()
