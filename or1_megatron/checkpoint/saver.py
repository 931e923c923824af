"""Saves a checkpoint while training continues: copies the state, then writes the copy in the background.

``save`` blocks the loop only while it copies the state into host buffers, which are kept for the next save. Over all
ranks together the buffers take 12 bytes per parameter in fp32 and 14 in bf16. With CUDA the buffers are page-locked and
take up to twice as much, because torch rounds each to a power of two. Data-parallel ranks divide the state that they
share. A thread then writes the buffers, with a process group of its own, because training uses the other groups.

Every rank writes and syncs one file. Rank 0 writes and syncs the files that exist once, the manifest last, and renames
the folder to its final name. A kill at any moment leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import datetime
import errno
import io
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from or1_megatron.checkpoint.keeper import put_in_place
from or1_megatron.checkpoint.manifest import FileEntry, write_manifest
from or1_megatron.checkpoint.shard_files import LocalShard, TensorSlice, WrittenSlice, write_metadata, write_slices
from or1_megatron.checkpoint.sharded_state import local_shards
from or1_megatron.errors import AgreedError
from or1_megatron.parallel.lockstep import LockstepError, raise_together
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.runtime.files import PARTIAL_SUFFIX
from or1_megatron.runtime.run_folder import FINISHED_RESPONSES, LOOP_STATE
from or1_megatron.runtime.seeds import random_state
from or1_megatron.runtime.timeline import span

log = logging.getLogger(__name__)

RANDOM = "random.pt"
COMMON = "common.pt"  # Megatron's name for the state that is not sharded
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LAST_WAIT_S = 10.0  # for a save that is overdue
_NO_ROOM_BYTES = 1 << 20  # if a write fails with less than this free, the disk counts as full


class CheckpointError(AgreedError):
    """A checkpoint cannot be written. The message names its folder and the cause."""


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The file that one rank has written, the slices in the file, and the rank's random state."""

    slices: list[WrittenSlice]
    file: str
    entry: FileEntry
    random: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _PendingSave:
    """The contents of one save, copied so that training does not change them."""

    folder: Path
    slices: Sequence[tuple[TensorSlice, Tensor]]
    random: Mapping[str, Any]
    common: Mapping[str, Any]
    loop_json: str
    responses: bytes


class CheckpointSaver:
    """Saves one rank's part of checkpoints. Every rank makes and closes a saver; rank 0's saver reports failed writes.

    Args:
        asynchronous: write in the background; otherwise ``save`` makes no copy and returns when all is on disk.
        timeout_s: longest time that a save may take once its state is copied.
        before_complete: rank 0's background thread calls this before it completes a checkpoint, to wait until other
            files of the run are on disk. A run that resumes from the checkpoint does not write these files again.
    """

    def __init__(
        self,
        policy: MegatronPolicy,
        asynchronous: bool = True,
        timeout_s: float = 1800.0,
        before_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy, self._mesh, self._before_complete = policy, policy.mesh, before_complete
        self._asynchronous, self._timeout_s = asynchronous, timeout_s
        self.responses = b""
        """On rank 0, the finished responses that the next checkpoint will contain."""
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._mesh.world > 1 else None
        self._written_here: list[LocalShard] | None = None
        self._buffers: list[tuple[TensorSlice, Tensor]] = []
        self._thread: threading.Thread | None = None
        self._overdue = False
        self._outcome: float | CheckpointError | None = None  # seconds or error of the last save, until reported
        if asynchronous:
            self._copied()  # the first use of memory is slow: do it before the loop waits for it

    # -- called by the loop --------------------------------------------------------------------------------------

    def save(self, folder: Path, loop_state: Mapping[str, Any]) -> None:
        """Start to save trained parameters, optimizer, generators and ``loop_state`` as ``folder``. A collective call.

        Returns when the state is copied. ``folder`` appears when all its files are on disk; only then does ``finish``
        return seconds. There is one set of buffers, so ``save`` first waits for a save that is still being written.

        Raises:
            CheckpointError: on every rank, when the disk is full or the previous save failed. Earlier checkpoints stay.
        """
        problem = self._ended()
        if self._mesh.rank == 0 and problem is None:
            problem = _prepare(folder, self.policy)
        raise_together(self._mesh, problem)
        loop_json = json.dumps(loop_state) if self._mesh.rank == 0 else ""
        common = {"sgd_steps": self.policy.sgd_steps, "base": self.policy.base}
        job = _PendingSave(folder, self._copied(), random_state(), common, loop_json, self.responses)
        self.responses = b""
        self._outcome = None
        self._thread = threading.Thread(target=self._write, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._asynchronous:
            raise_together(self._mesh, self._ended())

    def finish(self, wait: bool) -> float | None:
        """On rank 0, return the writing time in s of a save that completed since the last call. Else return None.

        With ``wait``, first wait for a save that is still being written.

        Raises:
            CheckpointError: a save failed.
        """
        if self._thread is not None and self._thread.is_alive() and not wait:
            return None
        if (problem := self._ended()) is not None:
            raise problem
        written_s, self._outcome = self._outcome, None
        assert not isinstance(written_s, CheckpointError)
        return written_s

    def close(self) -> None:
        """Wait for a running save. Call this before the process group is destroyed."""
        if (problem := self._ended(_LAST_WAIT_S if self._overdue else None)) is not None:
            log.error("%s", problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, LockstepError):  # a lost rank's part will not come
            self.close()

    def _ended(self, wait_s: float | None = None) -> CheckpointError | None:
        """Wait for the running save, if any. Return an error if it takes too long or, on rank 0, if it failed."""
        if self._thread is None:
            return None
        self._thread.join(self._timeout_s if wait_s is None else wait_s)
        self._overdue = self._thread.is_alive()
        if self._overdue:
            return CheckpointError(f"the running checkpoint was not written within {self._timeout_s:g} s")
        self._thread = None
        if not isinstance(self._outcome, CheckpointError):
            return None
        problem, self._outcome = self._outcome, None
        return problem

    def _copied(self) -> Sequence[tuple[TensorSlice, Tensor]]:
        """Return this rank's slices, each with its copy in the buffers or, for a synchronous save, its live tensor."""
        if self._written_here is None:
            self._written_here = [shard for shard in local_shards(self.policy) if shard.is_written_here]
        live = [
            (part, part.of(tensor))
            for shard in self._written_here
            for tensor in (shard.tensor(),)
            for part in shard.slices
        ]
        if not self._asynchronous:
            return live
        if not self._buffers:
            pinned = torch.cuda.is_available()
            self._buffers = [
                (part, torch.empty(data.shape, dtype=data.dtype, pin_memory=pinned)) for part, data in live
            ]
        for (_, buffer), (_, part) in zip(self._buffers, live, strict=True):
            buffer.copy_(part, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._buffers

    # -- run by the background thread ----------------------------------------------------------------------------

    @span("write")
    def _write(self, job: _PendingSave) -> None:
        started_s = time.perf_counter()
        try:
            parts = self._gathered(self._written(job))
            if self._mesh.rank == 0:
                self._before_complete()
                _complete(job, parts)
        except Exception as error:
            log.info("checkpoint %s could not be completed", job.folder, exc_info=True)
            if self._mesh.rank == 0:
                self._outcome = _not_written(job.folder, _reason(error))
        else:
            self._outcome = time.perf_counter() - started_s

    def _written(self, job: _PendingSave) -> _RankFile | str:
        """Write this rank's file and return its description, or the reason if writing failed."""
        path = _aside(job.folder) / f"__{self._mesh.rank}_0.distcp"
        try:
            slices, entry = write_slices(path, job.slices)
            return _RankFile(slices, path.name, entry, job.random)
        except Exception as error:  # rank 0 reports it
            log.info("rank %d could not write its part of %s", self._mesh.rank, job.folder, exc_info=True)
            return _reason(error)

    def _gathered(self, part: _RankFile | str) -> list[_RankFile | str]:
        if self._group is None:
            return [part]
        parts: list[Any] = [None] * self._mesh.world
        dist.gather_object(part, parts if self._mesh.rank == 0 else None, dst=0, group=self._group)
        return parts


def _aside(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is renamed to ``folder``."""
    return folder.with_name(folder.name + PARTIAL_SUFFIX)


def _complete(job: _PendingSave, parts: Sequence[_RankFile | str]) -> None:
    """Write, on rank 0, the files that exist once, the manifest last; then rename the folder to its final name."""
    for rank, part in enumerate(parts):
        if isinstance(part, str):
            raise RuntimeError(part if rank == 0 else f"rank {rank}: {part}")
    done = [part for part in parts if isinstance(part, _RankFile)]
    aside = _aside(job.folder)
    write_metadata(aside, [written for part in done for written in part.slices])
    for name, content in ((COMMON, job.common), (RANDOM, [dict(part.random) for part in done])):
        buffer = io.BytesIO()  # torch.save to a full disk raises an error that does not say so
        torch.save(content, buffer)
        (aside / name).write_bytes(buffer.getvalue())
    (aside / LOOP_STATE).write_text(job.loop_json)
    if job.responses:
        (aside / FINISHED_RESPONSES).write_bytes(job.responses)
    write_manifest(aside, {part.file: part.entry for part in done})
    put_in_place(aside, job.folder)


def _prepare(folder: Path, policy: MegatronPolicy) -> CheckpointError | None:
    """Make an empty folder for the checkpoint and check that its disk has room. Return the error, if there is one."""
    per_parameter = 12 if policy.dtype is torch.float32 else 14  # bytes: weight, moments, in bf16 a master
    needed, aside = policy.trained_count * per_parameter, _aside(folder)  # at least
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        free = shutil.disk_usage(aside).free
    except OSError as error:
        return _not_written(folder, _reason(error))
    if free < needed:
        return _not_written(folder, f"the disk is full: {free:,} bytes are free, a checkpoint takes {needed:,} or more")
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _FULL:
        return os.strerror(error.errno)
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)


def _not_written(folder: Path, reason: str) -> CheckpointError:
    """Delete a failed save's files, because the disk may be full, and return the error for ``reason``."""
    full = any(os.strerror(number) in reason for number in _FULL) or _without_room(folder.parent)
    reason, mended = ("the disk is full", "free some space") if full else (reason, "fix the cause")
    left = "The checkpoints before it are intact" if folder.parent.is_dir() else f"{folder.parent} has been removed"
    shutil.rmtree(_aside(folder), ignore_errors=True)
    return CheckpointError(
        f"checkpoint {folder} could not be written: {reason}. {left}: {mended} and run the same command again to "
        "resume from the newest that is left"
    )


def _without_room(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _NO_ROOM_BYTES
    except OSError:  # removed, or not to be read
        return False
