"""The interface of transports, which move messages from rank to rank (``Transport``), and the gloo transport."""

from __future__ import annotations

import atexit
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock, Thread, current_thread
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

_QUIET_S = 0.2  # for threads whose work is done
_CLOSE_S = 1.0  # for threads whose wait has been broken off
_NO_MESSAGE = 1 << 30  # a tag above the numbers of all messages


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message [n] uint8 that has arrived. Call ``release`` once, when the message has been read."""

    message: Tensor
    release: Callable[[], None]


class Transport(ABC):
    """Moves messages between two ranks. Messages from one rank to another arrive in the order of sending.

    ``number`` identifies a message among all messages of a handoff.
    """

    def __init__(self, timeout_s: float, abort: Callable[[], None]) -> None:
        """``abort``: a function that makes all waits under way fail; ``close`` calls it."""
        self._threads = WaitingThreads(timeout_s, abort)

    @abstractmethod
    def allocate(self, size_bytes: int) -> Tensor:
        """Return memory [size_bytes] uint8 from which this rank can send."""

    @abstractmethod
    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        """Start to send ``buffer`` [n] uint8, which must be the beginning of memory that ``allocate`` returned.

        The buffer must not change until the future is done. From then on the receiver does not need the buffer.
        """

    @abstractmethod
    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        """Start to receive a message into ``into`` [n] uint8. None: the transport provides the memory."""

    @abstractmethod
    def free_buffers(self) -> None:
        """Free the memory that a handoff has used. The next handoff allocates memory again."""

    def close(self) -> None:
        self._threads.close()
        self.free_buffers()


class BufferPool:
    """Buffers that are reused within a handoff."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._idle: list[Tensor] = []

    def take(self, size_bytes: int) -> Tensor:
        """Return a buffer of at least ``size_bytes`` with undefined contents."""
        for index, buffer in enumerate(self._idle):
            if buffer.numel() >= size_bytes:
                return self._idle.pop(index)
        if self._idle:  # too small: make room
            self._idle.pop()
        return self._allocate(size_bytes)

    def give(self, buffer: Tensor) -> None:
        self._idle.append(buffer)

    def clear(self) -> None:
        self._idle.clear()


def chain[T](inner: Future[T], outer: Future[T]) -> None:
    """Give ``outer`` the result or error of ``inner``, which must be done."""
    if (error := inner.exception()) is not None:
        outer.set_exception(error)
    else:
        outer.set_result(inner.result())


class Work(Protocol):
    """An operation of torch's process groups that is under way."""

    def wait(self, timeout: timedelta) -> Any: ...


class WaitingThreads:
    """Waits for torch's ``Work`` objects, with one thread for each that is under way.

    gloo's point-to-point works complete only inside the blocking wait(), and not in the order in which they were
    started. With fewer threads, a completed work would be noticed late.
    """

    def __init__(self, timeout_s: float, abort: Callable[[], None]) -> None:
        """``abort``: a function that makes all works under way fail."""
        self._timeout, self._abort = timedelta(seconds=timeout_s), abort
        atexit.register(self.close)  # a thread inside a wait of torch's aborts the process when Python ends
        self._starting = Lock()  # works are started by these threads too; a start may hang, so close takes no lock
        self._threads: set[Thread] = set()
        self._closed = False

    def follow[T](self, start: Callable[[], Work], then: Callable[[], T]) -> Future[T]:
        """Start a work. When the work is done, call ``then``; the future returned gets the result of ``then``."""
        done: Future[T] = Future()

        def wait(work: Work) -> None:
            try:
                work.wait(self._timeout)
                done.set_result(then())
            except Exception as error:  # belongs to whoever waits for the future
                done.set_exception(error)
            self._threads.discard(current_thread())

        with self._starting:
            try:
                if self._closed:
                    raise RuntimeError("this rank has left the handoff")
                thread = Thread(target=wait, args=(start(),), name="handoff wait", daemon=True)
            except RuntimeError as error:  # the connection is known to be broken
                done.set_exception(error)
                return done
            thread.start()  # before ``close`` can see it: a thread that has not started cannot be joined
            self._threads.add(thread)
            if done.done():
                self._threads.discard(thread)
        return done

    def close(self) -> None:
        """End the threads. Works that are still under way fail."""
        atexit.unregister(self.close)
        self._closed = True
        if not self._joined(_QUIET_S):
            self._abort()
            self._joined(_CLOSE_S)

    def _joined(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        threads = self._threads.copy()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def nothing() -> None:
    """Do nothing. This is the argument ``then`` of ``follow`` for a work that needs no action when it is done."""


def abort(group: ProcessGroupGloo) -> None:
    """Break all connections of a group, so that every wait on the connections ends, also on other ranks.

    gloo has no call for this, but it breaks all connections when a wait times out. So a short wait is made here.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        other = 1 if group.rank() == 0 else 0
        group.recv([nothing], other, _NO_MESSAGE).wait(timedelta(milliseconds=1))  # type: ignore[attr-defined]  # no stub


class PooledTransport(Transport):
    """The base of gloo's and NCCL's transports, which receive into reused buffers."""

    def __init__(self, timeout_s: float, abort: Callable[[], None]) -> None:
        super().__init__(timeout_s, abort)
        self._buffers = BufferPool(self.allocate)

    def finish_reading(self) -> None:
        """Block until the operations that read a message are done. Without a GPU there is nothing to wait for."""

    def place_for(self, size_bytes: int, into: Tensor | None) -> tuple[Tensor, Callable[[], Arrival]]:
        """Return (memory to receive a message in, a function that returns the message's ``Arrival``)."""
        owner = self._buffers.take(size_bytes) if into is None else into
        message = owner[:size_bytes]

        def release() -> None:
            if into is None:
                self.finish_reading()
                self._buffers.give(owner)

        return message, lambda: Arrival(message, release)

    def free_buffers(self) -> None:
        self._buffers.clear()


class GlooTransport(PooledTransport):
    """``Transport`` over a gloo group of all trainer and engine ranks. Uses host memory."""

    def __init__(self, group: ProcessGroupGloo, timeout_s: float) -> None:
        super().__init__(timeout_s, lambda: abort(group))
        self._group: Any = group  # send and recv are absent from torch's stub

    def allocate(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        return self._threads.follow(lambda: self._group.send([buffer], destination, number), nothing)

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        message, arrived = self.place_for(size_bytes, into)
        return self._threads.follow(lambda: self._group.recv([message], source, number), arrived)
