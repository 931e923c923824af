"""Buckets from trainer ranks to engine ranks: the transport, and the board on which all of them see who has failed."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroupGloo, Store

from or1_megatron.handoff.gloo import HandoffError

T = TypeVar("T")

_LOOK_S = 0.2  # how often a wait looks at the board
_BLAME_S = 3.0  # after a broken connection: how long to look for the cause


class Transport(Protocol):
    """Bytes between two ranks. Messages between the same two arrive in the order of ``number``."""

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        """Start to send ``buffer`` [n] uint8, which must stay as it is until the future is done."""
        ...

    def receive(self, buffer: Tensor, source: int, number: int) -> Future[None]:
        """Start to receive into ``buffer`` [n] uint8."""
        ...


class GlooTransport:
    """``Transport`` over a gloo group of all trainer and engine ranks, on CPU tensors."""

    def __init__(self, group: ProcessGroupGloo, timeout_s: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._started: SimpleQueue[tuple[Any, Future[None]] | None] = SimpleQueue()
        # gloo's point-to-point work completes only inside wait(), which blocks; a thread of its own does the waiting
        Thread(target=self._wait_in_turn, args=(self._started,), name="handoff wire", daemon=True).start()

    def send(self, buffer: Tensor, destination: int, number: int) -> Future[None]:
        return self._track(lambda: self._group.send([buffer], destination, number))  # type: ignore[attr-defined]  # no stub

    def receive(self, buffer: Tensor, source: int, number: int) -> Future[None]:
        return self._track(lambda: self._group.recv([buffer], source, number))  # type: ignore[attr-defined]  # no stub

    def _track(self, start: Callable[[], Any]) -> Future[None]:
        done: Future[None] = Future()
        try:
            self._started.put((start(), done))
        except RuntimeError as error:  # of a connection that is known to be broken
            done.set_exception(error)
        return done

    def _wait_in_turn(self, started: SimpleQueue[tuple[Any, Future[None]] | None]) -> None:
        while (item := started.get()) is not None:
            work, done = item
            try:
                work.wait(self._timeout)
                done.set_result(None)
            except RuntimeError as error:
                done.set_exception(error)

    def close(self) -> None:
        self._started.put(None)


class Board:
    """What the ranks of a handoff tell each other besides weights, over a store that trainer rank 0 hosts.

    The first failure is written here and ends every other rank's wait.
    """

    _FAILED = "failed"

    def __init__(self, store: Store, who: str, timeout_s: float) -> None:
        """``who`` stands for this process in the others' errors."""
        # a connection of its own: on a shared one, a wait elsewhere (for a group to form) would block every look
        self._store = store.clone()  # type: ignore[attr-defined]  # not in torch's stub
        self.who, self.timeout_s = who, timeout_s

    def fail(self, error: BaseException) -> None:
        """Tell everybody; a second failure is not news. Never raises."""
        try:
            if not self._store.check([self._FAILED]):
                self._store.set(self._FAILED, f"{self.who}: {error}")
        except RuntimeError:
            pass  # the board has gone with its host, and they will notice that

    def publish(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))

    def read(self, key: str, whose: str, keep: bool = True, watched: Future[Any] | None = None) -> Any:
        """What ``whose`` publishes; waits for it. ``keep=False``: nobody else will read it."""
        self._poll(lambda: self._store.check([key]) or None, f"{whose} to publish '{key}'", watched)
        value = pickle.loads(self._store.get(key))
        if not keep:
            self._store.delete_key(key)
        return value

    def wait(self, future: Future[T], what: str, watched: Future[Any] | None = None) -> T:
        """The result of ``future``.

        Raises:
            HandoffError: it failed, somebody else failed, ``watched`` failed, or the deadline has passed.
        """

        def done() -> bool | None:
            try:
                future.exception(timeout=_LOOK_S)
            except FutureTimeout:
                return None
            return True

        self._poll(done, what, watched, pause_s=0.0)
        if (error := future.exception()) is not None:
            self._find_cause(what, watched)
            raise HandoffError(f"handoff: {self.who} waited for {what}: {error}") from error
        return future.result()

    def _find_cause(self, what: str, watched: Future[Any] | None) -> None:
        """A connection broke: whoever left may still be saying why."""
        deadline = time.monotonic() + _BLAME_S
        while time.monotonic() < deadline:
            self._look(what)
            if watched is not None and watched.done() and (failure := watched.exception()) is not None:
                raise HandoffError(f"handoff: {self.who} waited for {what}: {failure}") from failure
            time.sleep(_LOOK_S)

    def _poll(
        self, done: Callable[[], bool | None], what: str, watched: Future[Any] | None, pause_s: float = 0.005
    ) -> None:
        deadline = time.monotonic() + self.timeout_s
        looked = time.monotonic()
        while True:
            try:
                if done():
                    return
            except (DistNetworkError, DistStoreError) as error:
                raise HandoffError(f"handoff: {self.who} waited for {what}: trainer rank 0 is gone") from error
            if watched is not None and watched.done() and (failure := watched.exception()) is not None:
                raise HandoffError(f"handoff: {self.who} waited for {what}: {failure}") from failure
            now = time.monotonic()
            if now - looked >= _LOOK_S:
                looked = now
                self._look(what)
            if now > deadline:
                raise HandoffError(f"handoff: {self.who} waited timeout_s = {self.timeout_s:g} for {what}")
            time.sleep(pause_s)

    def _look(self, what: str) -> None:
        try:
            failed = self._store.get(self._FAILED) if self._store.check([self._FAILED]) else None
        except (DistNetworkError, DistStoreError) as error:
            raise HandoffError(f"handoff: {self.who} waited for {what}: trainer rank 0 is gone") from error
        if failed is not None:
            raise HandoffError(f"handoff: {self.who} waited for {what}; meanwhile {failed.decode()}")


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` on a daemon thread: one that hangs must not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # belongs to whoever waits for the future
            future.set_exception(error)

    Thread(target=run, name="handoff", daemon=True).start()
    return future


def allocate(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)
