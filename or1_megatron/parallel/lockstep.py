"""Makes all trainer ranks execute the verb (method) that rank 0 names; a failure on any rank ends all ranks.

The wait for the next verb has no limit, so ranks wait on the TCP store of their process group and never inside a
collective. torchrun's agent hosts the store; without an agent, rank 0 does.

A rank that fails in a verb logs its traceback and ends. A rank also ends (``Heartbeat.within``) if it has not finished
the verb within ``deadline_s``, or if the store has not answered for that time. When a rank has ended, the launcher ends
the other ranks, and each of them logs where it is (``runtime.signals``). The watchdog ends ranks that are stopped.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.runtime.heartbeat import Heartbeat, main_thread_stack
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.runtime.timeline import span
from or1_verify.errors import Or1Error

log = logging.getLogger(__name__)

Verb = Callable[..., Any]
"""Takes this replica's payload, if the call has any, then the arguments for all ranks; returns this rank's result."""

STOP = "stop"

_ASK_S: Final = 30.0
"""A rank that waits for a verb asks the store again after this time, or after half the deadline if that is less."""
_UNWIND_S: Final = 120.0
"""A rank must end within this time after it raises an error. Meanwhile, rank 0 dumps the batch and closes engines."""
_LEAVE_S: Final = 5.0
"""Rank 0, which may host the store, waits this long for each rank to read that no more verbs follow."""
_GRACE_S: Final = 30.0
"""A rank that has lost a peer waits this long before it ends, so that the run's exit status is the failed rank's."""


class LockstepError(PartLost, RuntimeError):
    """Another rank failed in a verb, or is gone. The message of the failed rank is in the log and on stderr."""


class Lockstep:
    """One rank's part of the lockstep. A process may make several Locksteps, one after another, if all ranks do.

    Args:
        verbs: the functions that this rank can execute, by name; the names are equal on every rank.
        deadline_s: how long one verb may take on any rank.
        heart: this rank's heartbeat, which ends the rank at the deadline.
        note: called with the reason in one line, just before this rank ends.
    """

    _made = 0

    def __init__(
        self,
        mesh: Mesh,
        verbs: Mapping[str, Verb],
        deadline_s: float,
        heart: Heartbeat,
        note: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._mesh, self._verbs, self._deadline_s = mesh, verbs, deadline_s
        self._heart, self._note = heart, note
        Lockstep._made += 1
        shared: Any = _get_default_store()  # torch's stub lacks ``clone``, a connection of its own
        self._store = dist.PrefixStore(f"lockstep/{Lockstep._made}", shared.clone())
        self._count = 0
        self._closed = self._broken = False
        if mesh.world > 1:
            dist.barrier(mesh.control)  # the first verb's deadline begins when all ranks can receive it

    # -- rank 0 --------------------------------------------------------------------------------------------------

    def call(self, verb: str, *shared: Any, per_replica: Sequence[Any] | None = None) -> Any:
        """Execute a verb on all ranks; return rank 0's result.

        Args:
            shared: arguments that are sent to every rank (small).
            per_replica: one payload for each data-parallel index; each rank receives only its replica's payload, as the
                verb's first argument.

        Raises:
            RuntimeError: the ranks have no such verb. ``score_reference`` exists only with ``algorithm.kl.reference``.
        """
        if verb not in self._verbs:
            raise RuntimeError(f"this run's ranks have no verb '{verb}'; they have {', '.join(self._verbs)}")
        self._announce((verb, per_replica is not None))
        with self._watched(verb):
            return self._verbs[verb](*self._arguments(shared, per_replica, per_replica is not None))

    def _announce(self, header: tuple[str, bool]) -> None:
        """Publish (verb, whether replicas get payloads). The store keeps every header, so a header must be small."""
        self._store.set(f"verb/{self._count}", pack(header))  # type: ignore[arg-type]  # bytes are taken too

    def close(self) -> None:
        """Release the other ranks from ``serve``, unless the lockstep is broken. A second call does nothing."""
        if self._closed or self._broken:
            return
        self._closed = True
        if self._mesh.rank > 0:
            self._store.set(f"left/{self._mesh.rank}", "1")
            return
        with suppress(dist.DistError):  # the store is gone: the other ranks end by themselves
            self._announce((STOP, False))
            for rank in range(1, self._mesh.world):
                self._store.wait([f"left/{rank}"], datetime.timedelta(seconds=_LEAVE_S))

    # -- the other ranks -----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Execute verbs until rank 0 closes the lockstep.

        If a verb raises an AgreedError, all ranks have raised the same error and are still in step. Rank 0 handles it;
        this rank goes on. Any other error ends this process.

        Raises:
            LockstepError: the host of the store is gone.
        """
        while True:
            self._heart.says("waiting for a verb")
            verb, has_payload = unpack(self._next_header())
            if verb == STOP:
                self.close()
                return
            self._heart.says(f"in '{verb}'")
            try:
                with self._watched(verb):
                    self._verbs[verb](*self._arguments((), None, has_payload))
            except AgreedError as error:
                log.info("'%s': %s", verb, error)

    def _next_header(self) -> bytes:
        key = f"verb/{self._count}"
        ask_s = min(_ASK_S, self._deadline_s / 2)
        silent = f"the host of the store (torchrun's agent, or rank 0) has not answered for {self._deadline_s:g} s"
        while True:
            try:
                with span("wait", waits_for="rank 0"), self._heart.within(self._deadline_s, lambda: self._end(silent)):
                    self._store.wait([key], datetime.timedelta(seconds=ask_s))
                    return self._store.get(key)
            except dist.DistStoreError:
                continue  # no verb yet, as during a rollout: no failure
            except dist.DistNetworkError as error:
                self._must_end()
                raise LockstepError(f"rank {self._mesh.rank}: the store is gone while waiting for a verb") from error

    # -- all ranks -----------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self, verb: str) -> Iterator[None]:
        """End this rank if the verb in the block passes its deadline or raises any error except AgreedError."""
        self._count += 1
        late = f"'{verb}' was not finished after {self._deadline_s:g} s (cluster.verb_timeout_s)"
        try:
            with span(verb), self._heart.within(self._deadline_s, lambda: self._end(late)):
                yield
        except AgreedError:
            raise
        except Exception as error:
            if self._mesh.world == 1:
                raise
            self._failed(verb, error)

    def _failed(self, verb: str, error: Exception) -> NoReturn:
        """End this rank because of an error. Rank 0 raises the error instead, since the training loop may handle it."""
        how = "lost a peer" if _lost_a_peer(error) else "failed"
        if self._mesh.rank == 0:
            self._must_end()
            if how == "failed":
                raise error
            raise LockstepError(f"rank 0 lost a peer in '{verb}', whose message is above") from error
        log.error("rank %d %s in '%s':\n%s", self._mesh.rank, how, verb, "".join(traceback.format_exception(error)))
        if how == "lost a peer":
            time.sleep(_GRACE_S)
        else:
            self._note(f"in '{verb}': {type(error).__name__}: {error}")
        os._exit(1)

    def _must_end(self) -> None:
        """End this process after ``_UNWIND_S``, unless the error that this rank raises next has ended it already."""
        self._broken = True
        self._heart.ends_within(_UNWIND_S, lambda: self._end(f"it did not end within {_UNWIND_S:g} s of its error"))

    def _end(self, why: str) -> NoReturn:
        log.error("rank %d ends: %s; its main thread is at\n%s", self._mesh.rank, why, main_thread_stack())
        self._note(why)
        os._exit(1)

    def _arguments(self, shared: tuple[Any, ...], per_replica: Sequence[Any] | None, has_payload: bool) -> list[Any]:
        """Return the verb's arguments on this rank, from rank 0's ``shared`` and ``per_replica``."""
        verb_arguments = unpack(self._mesh.from_rank_0(pack(shared)))
        return [self._distribute(per_replica), *verb_arguments] if has_payload else [*verb_arguments]

    def _distribute(self, per_replica: Sequence[Any] | None) -> Any:
        """Return this replica's payload: rank 0 sends it to the replica's first rank, which broadcasts it."""
        mesh = self._mesh
        leader = mesh.replica_leaders[mesh.data_rank]
        packed: list[Any] = [None]
        if mesh.rank == 0:
            assert per_replica is not None
            packed = [pack(per_replica[0])]
            for destination, payload in zip(mesh.replica_leaders[1:], per_replica[1:], strict=True):
                dist.send_object_list([pack(payload)], destination, mesh.control)
        elif mesh.rank == leader:
            dist.recv_object_list(packed, 0, mesh.control)
        if dist.get_world_size(mesh.replica) > 1:
            dist.broadcast_object_list(packed, leader, mesh.replica)
        return unpack(packed[0])


def raise_together(mesh: Mesh, error: AgreedError | None) -> None:
    """Raise rank 0's ``error`` on every rank, unless it is None. Other ranks' ``error`` is ignored. Collective."""
    if (agreed := mesh.from_rank_0(error)) is not None:
        raise agreed


def _lost_a_peer(error: Exception) -> bool:
    """Return whether the error says that another rank is gone or late. gloo and NCCL have no error type for this."""
    text = str(error)
    if isinstance(error, Or1Error):
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("onnection" in text or "imed out" in text)
    )
