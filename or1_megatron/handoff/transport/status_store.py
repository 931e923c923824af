"""Connects trainer and engine ranks for handoffs: a store for published values and failures, and a gloo group.

Both are independent of the groups of Megatron and vLLM: the group is built from a separate store, and it is not
registered with ``torch.distributed``.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, ProcessGroupGloo, TCPStore

from or1_megatron.handoff.failures import HandoffError
from or1_megatron.runtime.timeline import span
from or1_megatron.runtime.world import address_towards

_LOOK_S = 0.2  # how often a wait looks for failures
_BLAME_S = 3.0  # after a broken connection: how long to look for the cause


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Open a store on a free port of this host. ``address`` must be an address of this host."""
    return TCPStore(address, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(address: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def open_group(store: TCPStore, rank: int, world_size: int, timeout_s: float) -> ProcessGroupGloo:
    """Return the gloo group of all ranks. Blocks until all ranks have called this.

    gloo listens on this host's address on the route to the store's host. By default it would listen on the address of
    the host name, which a container may not be able to resolve.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(store.host))]
    group = ProcessGroupGloo(PrefixStore("or1-handoff", store), rank, world_size, options)
    with span("clocks") as clocks:
        clocks.update(compare_clocks(group, world_size))
    return group


def compare_clocks(group: Any, world_size: int) -> dict[str, int]:
    """Measure by how much this rank's clock is ahead of rank 0's clock.

    All ranks read their clocks after each of 16 barriers. Returns the median (``ahead_ns``) and range (``within_ns``).
    """
    read = []
    for _ in range(16):
        group.barrier().wait()
        read.append(time.time_ns())
    everyone = [torch.tensor(read) for _ in range(world_size)]
    group.allgather([everyone], [torch.tensor(read)]).wait()
    ahead = torch.tensor(read) - everyone[0]
    return {"ahead_ns": int(ahead.median()), "within_ns": int(ahead.max() - ahead.min())}


class StatusStore:
    """Lets the ranks of a handoff publish and read values over a store that trainer rank 0 hosts.

    The first failure is published too, and ends the waits of all other ranks.
    """

    _FAILED = "failed"

    def __init__(self, store: TCPStore, who: str, timeout_s: float) -> None:
        """``who``: the name of this process in other ranks' errors."""
        self.tcp = store
        """The store that forms groups. Trainer rank 0 hosts it."""
        # A connection of its own: on a shared one, a wait elsewhere (for a group to form) would block every look. Not
        # clone(), which now and then takes 5 s.
        self._store = join_store(store.host, store.port, timeout_s)
        self.who, self.timeout_s = who, timeout_s

    def fail(self, error: BaseException) -> None:
        """Publish this rank's failure to all ranks, unless another rank failed before. Never raises."""
        try:
            if not self._store.check([self._FAILED]):
                self._store.set(self._FAILED, f"{self.who}: {error}")
        except RuntimeError:
            pass  # the store has gone with its host, and they will notice that

    def publish(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # the stub knows str alone

    def read(self, key: str, whose: str, watched: Future[Any] | None = None) -> Any:
        """Wait until the rank named ``whose`` has published ``key``, and return the value."""
        self._poll(lambda: self._store.check([key]), f"{whose} to publish '{key}'", watched, pause_s=0.005)
        return pickle.loads(self._store.get(key))

    def wait[T](self, future: Future[T], what: str, watched: Future[Any] | None = None) -> T:
        """Wait for the result of ``future``, and return it.

        Raises:
            HandoffError: ``future`` failed, another rank failed, ``watched`` failed, or the deadline has passed.
        """
        self._poll(lambda: bool(futures.wait([future], _LOOK_S).done), what, watched, pause_s=0.0)
        if (error := future.exception()) is not None:
            until = time.monotonic() + _BLAME_S  # a connection broke: the rank that left may still be saying why
            self._poll(lambda: time.monotonic() > until, what, watched, pause_s=_LOOK_S)
            raise HandoffError(f"handoff: {self.who} waited for {what}: {error}") from error
        return future.result()

    def _poll(self, done: Callable[[], bool], what: str, watched: Future[Any] | None, pause_s: float) -> None:
        """Wait until ``done`` returns true. Raises HandoffError if ``watched`` or a rank fails, or on time-out."""
        waited = f"handoff: {self.who} waited for {what}"
        deadline = time.monotonic() + self.timeout_s
        look_at = time.monotonic() + _LOOK_S
        with span("wait", waits_for=what):
            while True:
                try:
                    if done():
                        return
                    now = time.monotonic()
                    if now >= look_at:
                        look_at = now + _LOOK_S
                        if watched is not None and watched.done() and (failure := watched.exception()) is not None:
                            raise HandoffError(f"{waited}: {failure}") from failure
                        if self._store.check([self._FAILED]):
                            raise HandoffError(f"{waited}; meanwhile {self._store.get(self._FAILED).decode()}")
                except (DistNetworkError, DistStoreError) as error:
                    raise HandoffError(f"{waited}: trainer rank 0 is gone") from error
                if now > deadline:
                    raise HandoffError(f"handoff: {self.who} waited timeout_s = {self.timeout_s:g} for {what}")
                time.sleep(pause_s)


def in_background[T](call: Callable[[], T]) -> Future[T]:
    """Run ``call`` on a daemon thread, so that a call that hangs does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # belongs to whoever waits for the future
            future.set_exception(error)

    Thread(target=run, name="handoff", daemon=True).start()
    return future
