"""Lockstep: rank 0 names a verb, every rank executes it; a failure anywhere ends all ranks with its traceback.

Ranks wait for the next verb on a TCP store that rank 0 hosts, never inside a collective: between verbs the wait is
unbounded, and rank 0's death breaks the connection. Inside a verb a watchdog on each rank holds the deadline and looks
for failures that others have reported.
"""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from or1_megatron.parallel.agreement import AgreedError
from or1_megatron.parallel.mesh import Mesh

log = logging.getLogger(__name__)

Verb = Callable[[Any, Any], Any]
"""(what all ranks receive, what this replica receives) -> this rank's result."""

STOP = "stop"
_FAILURE = "failure"
_STALLED = "stalled"
_POLL_S = 0.5


class LockstepError(RuntimeError):
    """A verb failed on some rank; the message holds that rank's traceback."""


class Lockstep:
    """One rank's end of the lockstep.

    Args:
        verbs: what this rank can execute; the same names on every rank.
        deadline_s: how long one verb may take on any rank.
    """

    def __init__(self, mesh: Mesh, verbs: Mapping[str, Verb], deadline_s: float) -> None:
        self._mesh, self._verbs, self._deadline_s = mesh, verbs, deadline_s
        self._store = _shared_store(mesh)
        self._watch_store = self._store.clone()  # type: ignore[attr-defined]  # not in torch's stub
        self._count = 0
        self._running: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._main_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="lockstep-watchdog", daemon=True).start()

    # -- rank 0 --------------------------------------------------------------------------------------------------

    def call(self, verb: str, shared: Any = None, per_replica: Sequence[Any] | None = None) -> Any:
        """Execute a verb on all ranks; returns rank 0's result.

        Args:
            shared: sent to every rank (small).
            per_replica: one payload for each data-parallel index; each rank receives its own replica's only.
        """
        self._announce((verb, per_replica is not None))
        return self._execute(verb, shared, per_replica, per_replica is not None)

    def _announce(self, header: tuple[str, bool]) -> None:
        """(verb, whether replicas get payloads): a few bytes, since the store keeps them all."""
        self._store.set(f"verb/{self._count}", pickle.dumps(header))  # type: ignore[arg-type]  # bytes are taken too

    def close(self) -> None:
        """Release the other ranks from serve."""
        if self._closed.is_set():
            return
        if self._mesh.rank == 0:
            self._announce((STOP, False))
        self._closed.set()

    # -- the other ranks -----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Execute verbs until rank 0 closes.

        Raises:
            LockstepError: rank 0 is gone.
        """
        while True:
            verb, has_payload = pickle.loads(self._next_header())
            if verb == STOP:
                self._closed.set()
                return
            self._execute(verb, None, None, has_payload)

    def _next_header(self) -> bytes:
        key = f"verb/{self._count}"
        while True:
            try:
                self._store.wait([key], datetime.timedelta(days=1))
                return self._store.get(key)
            except dist.DistStoreError:
                continue  # rank 0 is rolling out; no news is no failure
            except dist.DistNetworkError as error:
                raise LockstepError(f"rank {self._mesh.rank}: rank 0 is gone while waiting for a verb") from error

    # -- all ranks -----------------------------------------------------------------------------------------------

    def _execute(self, verb: str, shared: Any, per_replica: Sequence[Any] | None, has_payload: bool) -> Any:
        self._count += 1
        self._running = (verb, time.monotonic())
        try:
            if self._mesh.world > 1:
                box = [shared]
                dist.broadcast_object_list(box, src=0, group=self._mesh.control)
                shared = box[0]
            mine = self._distribute(per_replica) if has_payload else None
            return self._verbs[verb](shared, mine)
        except Exception as error:
            raise self._failed(verb, error) from error
        finally:
            self._running = None

    def _failed(self, verb: str, error: Exception) -> Exception:
        """Report this rank's failure unless another rank's came first; the error to raise here.

        A peer's death shows as a broken collective, so the first report is given a moment to arrive.
        """
        report = f"rank {self._mesh.rank} failed in '{verb}':\n{''.join(traceback.format_exception(error))}"
        if self._mesh.world == 1 or isinstance(error, AgreedError):
            return error
        secondary = isinstance(error, RuntimeError) and "onnection" in str(error)
        if secondary:
            time.sleep(2 * _POLL_S)
        try:
            first = self._store.compare_set(_FAILURE, "", report).decode()
        except dist.DistError:
            return LockstepError(report)
        own = first == report and self._mesh.rank == 0  # the loop may know what to do with its own error
        return error if own else LockstepError(first)

    def _distribute(self, per_replica: Sequence[Any] | None) -> Any:
        """Each replica's payload, from rank 0 to the replica's first rank, and from there to its other ranks."""
        mesh = self._mesh
        if mesh.world == 1:
            assert per_replica is not None
            return per_replica[0]
        leader = mesh.replica_leaders[mesh.data_rank]
        packed: torch.Tensor | None = None
        if mesh.rank == 0:
            assert per_replica is not None
            blobs = [_pack(payload) for payload in per_replica]
            for destination, blob in zip(mesh.replica_leaders[1:], blobs[1:], strict=True):
                _send(blob, destination, mesh.control)
            packed = blobs[0]
        elif mesh.rank == leader:
            packed = _receive(0, mesh.control)
        if dist.get_world_size(mesh.replica) > 1:
            packed = _broadcast(packed, leader, mesh.replica)
        assert packed is not None
        return pickle.loads(packed.numpy().tobytes())

    # -- the watchdog --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            running = self._running
            try:
                if self._watch_store.check([_FAILURE]):
                    report = self._watch_store.get(_FAILURE).decode()
                    self._die(self._everyone_is_at() if report == _STALLED else report, grace_s=5.0)
                elif running is not None and time.monotonic() - running[1] > self._deadline_s:
                    self._watch_store.compare_set(_FAILURE, "", _STALLED)
                    self._die(self._everyone_is_at(), grace_s=0.0)
            except dist.DistError:
                if not self._closed.wait(5.0):
                    self._die(f"rank {self._mesh.rank}: rank 0, which hosts the store, is gone", grace_s=5.0)

    def _everyone_is_at(self) -> str:
        """After a stall: where each rank is. Each tells the others, and waits a moment for them to tell."""
        frame = sys._current_frames().get(self._main_thread)
        running = self._running
        verb = "waiting for a verb" if running is None else f"in '{running[0]}'"
        stack = "".join(traceback.format_stack(frame)) if frame else "(unknown)"
        self._watch_store.set(f"where/{self._mesh.rank}", f"rank {self._mesh.rank}, {verb}, is at\n{stack}")
        keys = [f"where/{rank}" for rank in range(self._mesh.world)]
        told_by = time.monotonic() + 6 * _POLL_S
        while time.monotonic() < told_by and not self._watch_store.check(keys):
            time.sleep(_POLL_S / 5)
        told = [self._watch_store.get(key).decode() for key in keys if self._watch_store.check([key])]
        silent = [key.removeprefix("where/") for key in keys if not self._watch_store.check([key])]
        if silent:
            told.append(f"not heard from: rank {', '.join(silent)}")
        head = f"a verb was not finished after {self._deadline_s:g} s (cluster.verb_timeout_s)"
        return "\n".join([head, *told])

    def _die(self, report: str, grace_s: float) -> None:
        """Let the main thread fail by itself for a moment (it may be raising already), then end the process."""
        if self._closed.wait(grace_s):
            return
        log.error("ending this rank: %s", report)
        print(f"[rank {self._mesh.rank}] ending: {report}", file=sys.stderr, flush=True)
        os._exit(1)


def _shared_store(mesh: Mesh) -> dist.TCPStore:
    """A TCP store of our own, hosted by rank 0; its address travels over the control group."""
    address: list[Any] = [None]
    store: dist.TCPStore | None = None
    timeout = datetime.timedelta(seconds=300)
    if mesh.rank == 0:
        host = "127.0.0.1" if mesh.world == 1 else os.environ.get("MASTER_ADDR", socket.gethostname())
        if host in ("localhost", "127.0.0.1"):
            host = "127.0.0.1"
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        address = [(host, store.port)]
    if mesh.world > 1:
        dist.broadcast_object_list(address, src=0, group=mesh.control)
    if store is None:
        host, port = address[0]
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store


def _pack(payload: Any) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(pickle.dumps(payload, protocol=5), dtype=np.uint8).copy())


def _send(blob: torch.Tensor, destination: int, group: dist.ProcessGroup) -> None:
    dist.send(torch.tensor([blob.numel()]), destination, group=group)
    dist.send(blob, destination, group=group)


def _receive(source: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, source, group=group)
    blob = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(blob, source, group=group)
    return blob


def _broadcast(blob: torch.Tensor | None, source: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = torch.tensor([blob.numel() if blob is not None else 0])
    dist.broadcast(size, source, group=group)
    if blob is None:
        blob = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(blob, source, group=group)
    return blob
