"""Messages from rank to rank: what a transport is, and gloo's."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

T = TypeVar("T")

_QUIET_S = 0.2  # for threads that have nothing left to wait for
_CLOSE_S = 1.0  # for threads whose wait has been broken off
_LEFT = "this rank has left the handoff"
_NO_MESSAGE = 1 << 30  # a tag beyond all numbers of messages


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that has come. ``message`` [n] uint8 is the receiver's to read until it calls ``release``, once."""

    message: Tensor
    release: Callable[[], None]


class Transport(Protocol):
    """Bytes between two ranks. Messages between the same two, in one direction, arrive in the order of sending.

    ``number`` stands for one message among all of a handoff.
    """

    bytes_sent: int
    """By this rank, since the transport was opened: what has been handed over to other ranks, notices left out."""
    bytes_received: int

    def begin(self, numbers: Sequence[int]) -> None:
        """A handoff begins, in which this rank starts these messages over this transport, once for each peer.

        Called where several threads of the rank do; a transport that needs one order then starts them in this one.
        """
        ...

    def allocate(self, size_bytes: int) -> Tensor:
        """Memory that this rank may send from: [size] uint8."""
        ...

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        """Start to send ``buffer`` [n] uint8, the beginning of something ``allocate`` gave.

        It must stay as it is until the future is done: then the receiver has no more use for it.
        """
        ...

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        """Start to receive. ``into`` [n] uint8: where the message shall be; else the transport finds a place."""
        ...

    def rest(self) -> None:
        """A handoff is over: give back memory that the next will need again."""
        ...

    def close(self) -> None: ...


class ByteCounter:
    """The bytes of a transport; its waiting threads count together."""

    def __init__(self) -> None:
        self.bytes_sent = self.bytes_received = 0
        self._counting = Lock()

    def count(self, sent: int = 0, received: int = 0) -> None:
        with self._counting:
            self.bytes_sent += sent
            self.bytes_received += received


class BufferPool:
    """Memory that is used again and again within a handoff."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._idle: list[Tensor] = []

    def take(self, size_bytes: int) -> Tensor:
        """At least so large; contents undefined."""
        for index, buffer in enumerate(self._idle):
            if buffer.numel() >= size_bytes:
                return self._idle.pop(index)
        if self._idle:  # too small: it makes way
            self._idle.pop()
        return self._allocate(size_bytes)

    def give(self, buffer: Tensor) -> None:
        self._idle.append(buffer)

    def clear(self) -> None:
        self._idle.clear()


def host_buffer(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


class OrderedStarts:
    """Starts what several threads hand in: on a thread of its own, which alone may have to wait, and in one order."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._given: list[tuple[int, Callable[[], Future[Any]], Future[Any]]] = []
        self._changed = Condition()
        self._closed = False
        Thread(target=self._serve, name="handoff start", daemon=True).start()

    def begin(self, numbers: Sequence[int]) -> None:
        """From now on things are started in this order; before the first call, and after the last number, as they come.

        A number may stand there several times.
        """
        with self._changed:
            self._order = deque(numbers)
            self._changed.notify()

    def hand_in(self, number: int, start: Callable[[], Future[T]]) -> Future[T]:
        """Call ``start`` when it is ``number``'s turn; the future is that which it returns."""
        found: Future[T] = Future()
        with self._changed:
            if self._closed:
                found.set_exception(RuntimeError(_LEFT))
            else:
                self._given.append((number, start, found))
                self._changed.notify()
        return found

    def _due(self) -> int | None:
        """The place, in what has been handed in, of what is to be started now."""
        if not self._order:
            return 0 if self._given else None
        return next((place for place, item in enumerate(self._given) if item[0] == self._order[0]), None)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due() is not None)
                place = self._due()
                if self._closed or place is None:
                    return
                _, start, found = self._given.pop(place)
                if self._order:
                    self._order.popleft()
            try:
                start().add_done_callback(lambda inner, outer=found: _follow(inner, outer))  # type: ignore[misc]
            except Exception as error:  # belongs to whoever waits for the future
                found.set_exception(error)
            del start, found

    def close(self) -> None:
        """What has not been started never is; it fails."""
        with self._changed:
            self._closed = True
            left, self._given = self._given, []
            self._changed.notify()
        for _, _, found in left:
            found.set_exception(RuntimeError(_LEFT))


def _follow(inner: Future[T], outer: Future[T]) -> None:
    if (error := inner.exception()) is not None:
        outer.set_exception(error)
    else:
        outer.set_result(inner.result())


class Work(Protocol):
    """What torch's process groups return."""

    def wait(self, timeout: timedelta) -> Any: ...


class WaitingThreads:
    """Threads that wait for works, one for each that is under way.

    gloo's point-to-point works complete only inside wait(), which blocks; and they complete in another order than they
    were started in: news of one must not be held up behind another that waits for it.
    """

    def __init__(self, timeout_s: float, abort: Callable[[], None]) -> None:
        """``abort``: makes all works that are under way fail."""
        self._timeout, self._abort = timedelta(seconds=timeout_s), abort
        atexit.register(self.close)  # a thread that Python's end meets inside a wait of torch's aborts the process
        self._started: SimpleQueue[tuple[Work, Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._lock = Lock()
        self._starting = Lock()  # works are started by these threads too; and a start may hang, where close must not
        self._threads: list[Thread] = []
        self._idle = 0
        self._closed = False

    def follow(self, start: Callable[[], Work], then: Callable[[], T]) -> Future[T]:
        """Start a work; the future is what ``then`` returns when it is done."""
        done: Future[T] = Future()
        with self._starting:
            try:
                if self._closed:
                    raise RuntimeError(_LEFT)
                work = start()
            except RuntimeError as error:  # of a connection that is known to be broken
                done.set_exception(error)
                return done
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._threads.append(Thread(target=self._serve, name="handoff wait", daemon=True))
                self._threads[-1].start()
            self._started.put((work, then, done))
            if self._closed:  # meanwhile: for a thread that close did not know of
                self._started.put(None)
        return done

    def _serve(self) -> None:
        while (item := self._started.get()) is not None:
            work, then, done = item
            try:
                work.wait(self._timeout)
                done.set_result(then())
            except Exception as error:  # belongs to whoever waits for the future
                done.set_exception(error)
            del item, work, then, done  # or the last message's memory would be held while waiting for the next
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        """End the threads; those that are still waiting for something fail."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._started.put(None)
        if not self._joined(_QUIET_S):
            self._abort()
            self._joined(_CLOSE_S)

    def _joined(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def abort(group: ProcessGroupGloo) -> None:
    """Break all of a group's connections, so that every wait on them ends, the peers' too.

    gloo has no call for that; but it does it when a wait runs out of time.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError):
        other = 1 if group.rank() == 0 else 0
        group.recv([nothing], other, _NO_MESSAGE).wait(timedelta(milliseconds=1))  # type: ignore[attr-defined]  # no stub


class GlooTransport(ByteCounter):
    """``Transport`` over a gloo group of all trainer and engine ranks. Memory is the host's."""

    def __init__(self, group: ProcessGroupGloo, timeout_s: float) -> None:
        super().__init__()
        self._group = group
        self._waiters = WaitingThreads(timeout_s, lambda: abort(group))
        self._buffers = BufferPool(host_buffer)

    def begin(self, numbers: Sequence[int]) -> None:
        """Messages have tags, and nothing of one waits for another."""

    def allocate(self, size_bytes: int) -> Tensor:
        return host_buffer(size_bytes)

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        def sent() -> None:
            self.count(sent=buffer.numel())

        return self._waiters.follow(
            lambda: self._group.send([buffer], destination, number),  # type: ignore[attr-defined]  # no stub
            sent,
        )

    def receive(self, size_bytes: int, source: int, number: int, into: Tensor | None = None) -> Future[Arrival]:
        owner = self._buffers.take(size_bytes) if into is None else into
        message = owner[:size_bytes]

        def release() -> None:
            if into is None:
                self._buffers.give(owner)

        def arrived() -> Arrival:
            self.count(received=size_bytes)
            return Arrival(message, release)

        return self._waiters.follow(
            lambda: self._group.recv([message], source, number),  # type: ignore[attr-defined]  # no stub
            arrived,
        )

    def rest(self) -> None:
        self._buffers.clear()

    def close(self) -> None:
        self._waiters.close()
        self.rest()
