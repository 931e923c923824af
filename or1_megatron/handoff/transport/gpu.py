"""The transports between GPUs: NCCL point to point, which has not been run so far, and CUDA IPC.

What to look at first when NCCL is tried (``or1 selftest transports handoff``):

- Each pair of ranks makes a communicator at its first message, and blocks until both ranks do this. A communicator
  takes some tens of MiB of device memory. Both directions share its stream.
- NCCL's kernels wait on the device (in a single queue, with CUDA_DEVICE_MAX_CONNECTIONS=1), so a trainer rank starts
  all its messages in the plan's order. A separate thread starts them; if it hangs, the rank still sees errors.
- A new thread uses device 0, whatever other threads use. So devices are named here, never "the current one".
- CUDA IPC exports whole blocks of torch's caching allocator, so ``expandable_segments`` must be off. An engine that
  sees only some of the GPUs numbers them in another way than the trainer.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from or1_megatron.handoff.failures import HandoffError
from or1_megatron.handoff.transport.base import Arrival, PooledTransport, Work, chain, nothing

_DEVICE_ARGUMENT = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


def device_buffer(size_bytes: int, device: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", device))


class _Finished:
    """A ``Work`` of NCCL whose ``wait`` blocks the host, because NCCL's own ``wait`` only orders streams."""

    def __init__(self, work: Any, device: int) -> None:
        self._work, self._device = work, device

    def wait(self, timeout: timedelta) -> None:
        torch.cuda.set_device(self._device)  # of this thread
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            self._work.wait(timeout)
        stream.synchronize()


class NcclTransport(PooledTransport):
    """``Transport`` between GPUs, one GPU per rank. Uses device memory."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with _without_watchdog():
            self._group: Any = ProcessGroupNCCL(PrefixStore("or1-handoff-nccl", store), rank, world, options)
        self._device = torch.cuda.current_device()
        self._starts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        Thread(target=self._start_all, name="handoff start", daemon=True).start()
        super().__init__(timeout_s, self._group.abort)

    def _start_all(self) -> None:
        while (start := self._starts.get()) is not None:
            start()

    def allocate(self, size_bytes: int) -> Tensor:
        return device_buffer(size_bytes, self._device)

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        # NCCL has no tags: between two ranks the order of starting is the order of the plan
        return self._follow(lambda: self._group.send([buffer], destination, 0), nothing)

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        message, arrived = self.place_for(size_bytes, into)
        return self._follow(lambda: self._group.recv([message], source, 0), arrived)

    def finish_reading(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # the loaders' copies; NCCL will write here again

    def _follow[T](self, start: Callable[[], Any], then: Callable[[], T]) -> Future[T]:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))  # the buffer has been packed, or read for the last time

        def work() -> Work:
            torch.cuda.set_device(self._device)  # for the thread that starts the work
            torch.cuda.current_stream().wait_event(ready)  # NCCL's stream waits for this stream
            return _Finished(start(), self._device)

        done: Future[T] = Future()
        self._starts.put(lambda: self._threads.follow(work, then).add_done_callback(lambda inner: chain(inner, done)))
        return done

    def close(self) -> None:
        self._starts.put(None)
        super().close()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Within the block, create NCCL groups whose watchdog does not end the process when another rank is gone."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class CudaSharedMemory:
    """Allocates device memory that other processes can map over CUDA IPC, for ``SharedMemoryTransport``."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()

    def allocate(self, size_bytes: int) -> Tensor:
        return device_buffer(size_bytes, self._device)

    def describe(self, buffer: Tensor) -> Any:
        torch.cuda.current_stream(self._device).synchronize()  # what was packed is there for other processes to see
        return reduce_tensor(buffer)

    def map(self, description: Any) -> Tensor:
        rebuild, arguments = described_for(description, self._device)
        torch.cuda.set_device(self._device)  # of a waiting thread
        try:
            return rebuild(*arguments)
        except RuntimeError as error:
            raise HandoffError(
                f"handoff: cannot map another process's device memory ({error}); CUDA IPC needs both on one node, GPUs "
                "that are peers, and PYTORCH_CUDA_ALLOC_CONF without expandable_segments"
            ) from error

    def finish_reading(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def free(self) -> None:
        """Reclaim sent blocks that no process maps any longer. A mapping ends when its tensor is deleted."""
        torch.cuda.ipc_collect()


def described_for(description: tuple[Any, tuple[Any, ...]], device: int) -> tuple[Any, tuple[Any, ...]]:
    """Return what ``reduce_tensor`` returned, changed for a process that numbers its own GPU as ``device``.

    The sender's device number may name another GPU, or none, in a process that sees other GPUs. Memory of another GPU
    is also opened on the process's own device, where the driver maps the memory.
    """
    rebuild, arguments = description
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], device, *arguments[_DEVICE_ARGUMENT + 1 :])
