"""Messages that stay where the sender has packed them: the receiver maps the memory and reads it there.

A notice (which memory, how much) goes one way and an acknowledgement the other, both over gloo; the weights do not
travel. Memory is shared through the ``SharedMemory`` port: the host's here, CUDA IPC in ``gpu``.
"""

from __future__ import annotations

import mmap
import os
import pickle
import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from or1_megatron.handoff.failures import HandoffError
from or1_megatron.handoff.transport.base import Arrival, Transport, Work, abort, nothing

_NOTICE_BYTES = 2048
_HEADER_BYTES = mmap.PAGESIZE
_TOKEN_BYTES = 16


class SharedMemory(Protocol):
    """Memory that other processes of this node can map."""

    def allocate(self, size_bytes: int) -> Tensor: ...

    def describe(self, buffer: Tensor) -> Any:
        """Return what ``map`` needs in another process, picklable; what was written to ``buffer`` is visible."""

    def map(self, description: Any) -> Tensor:
        """Map the memory of a description. Raises HandoffError when it cannot be reached from here."""

    def finish_reading(self) -> None:
        """Block until the operations that were started on mapped memory no longer need it."""

    def free(self) -> None:
        """Free what has been allocated and mapped."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of shared memory, in the process that has made it."""

    descriptor: int
    token: bytes


class HostSharedMemory:
    """``SharedMemory`` of the host without names (memfd): it is freed when the last process that maps it ends."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._mapped: dict[tuple[int, int, bytes], Tensor] = {}

    def allocate(self, size_bytes: int) -> Tensor:
        descriptor = os.memfd_create("or1-handoff", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEADER_BYTES + size_bytes)
        pages = _tensor(mmap.mmap(descriptor, _HEADER_BYTES + size_bytes))
        token = secrets.token_bytes(_TOKEN_BYTES)
        pages[:_TOKEN_BYTES] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        buffer = pages[_HEADER_BYTES:]
        self._segments[buffer.data_ptr()] = Segment(descriptor, token)
        return buffer

    def describe(self, buffer: Tensor) -> Any:
        segment = self._segments[buffer.data_ptr()]
        return os.getpid(), segment.descriptor, segment.token

    def map(self, description: Any) -> Tensor:
        if (known := self._mapped.get(description)) is not None:
            return known
        pid, number, token = description
        try:
            with open(f"/proc/{pid}/fd/{number}", "r+b") as file:
                pages = _tensor(mmap.mmap(file.fileno(), 0))
        except (OSError, ValueError) as error:
            raise _unreachable(pid, error) from error
        if bytes(pages[:_TOKEN_BYTES].tolist()) != token:
            raise _unreachable(pid, "another process has this number here")
        return self._mapped.setdefault(description, pages[_HEADER_BYTES:])

    def finish_reading(self) -> None:
        """Do nothing: operations on host memory have read it when they return."""

    def free(self) -> None:
        for segment in self._segments.values():
            os.close(segment.descriptor)
        self._segments.clear()
        self._mapped.clear()


def _tensor(pages: mmap.mmap) -> Tensor:
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unreachable(pid: int, why: object) -> HandoffError:
    return HandoffError(
        f"handoff: cannot map the memory of process {pid} ({why}); shared memory needs trainer and engines on one "
        "node, under one user and in one PID namespace; handoff.transport = gloo does not"
    )


class _Answered:
    """A notice and the answer to it, as one work."""

    def __init__(self, notice: Work, answer: Work) -> None:
        self._notice, self._answer = notice, answer

    def wait(self, timeout: timedelta) -> None:
        self._notice.wait(timeout)
        self._answer.wait(timeout)


class SharedMemoryTransport(Transport):
    """``Transport`` on one node: any number of receivers read the bytes where the sender has packed them."""

    def __init__(self, group: ProcessGroupGloo, memory: SharedMemory, timeout_s: float) -> None:
        """``group``: all ranks'; it carries notices and acknowledgements."""
        super().__init__(timeout_s, lambda: abort(group))
        self._group: Any = group  # send and recv are absent from torch's stub
        self._memory = memory

    def allocate(self, size_bytes: int) -> Tensor:
        return self._memory.allocate(size_bytes)

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        raw = pickle.dumps((self._memory.describe(buffer), buffer.numel()))
        assert len(raw) <= _NOTICE_BYTES
        notice = torch.frombuffer(bytearray(raw.ljust(_NOTICE_BYTES, b"\0")), dtype=torch.uint8)
        answer = torch.empty(1, dtype=torch.uint8)

        def start() -> Work:
            expected = self._group.recv([answer], destination, number)
            return _Answered(self._group.send([notice], destination, number), expected)

        return self._threads.follow(start, nothing)

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        notice = torch.empty(_NOTICE_BYTES, dtype=torch.uint8)

        def release() -> None:
            self._memory.finish_reading()
            answer = torch.zeros(1, dtype=torch.uint8)
            self._threads.follow(lambda: self._group.send([answer], source, number), nothing)

        def arrived() -> Arrival:
            description, announced = pickle.loads(notice.numpy().tobytes())
            if announced != size_bytes:
                raise HandoffError(f"handoff: rank {source} sent {announced} bytes, {size_bytes} were expected")
            message = self._memory.map(description)[:size_bytes]
            if into is None:
                return Arrival(message, release)
            into[:size_bytes].copy_(message)
            release()
            return Arrival(into[:size_bytes], nothing)

        return self._threads.follow(lambda: self._group.recv([notice], source, number), arrived)

    def free_buffers(self) -> None:
        self._memory.free()
