"""Saving a checkpoint while training goes on: copy the state, write the copy in the background.

``save`` holds the loop for a copy of the state into host buffers that are kept for the next save. They take 12 bytes
per parameter in fp32 and 14 in bf16 (page-locked, with CUDA, up to twice that: torch rounds each buffer up to a power
of two), over all ranks together: what data-parallel ranks hold in common is dealt out
among them. A thread then writes, and its exchanges with other ranks go over a process group of their own, since those
of training go on meanwhile.

Every rank writes and syncs its file; rank 0 adds what there is one of, the manifest last, syncs, and renames the folder
into place. Killed at any moment, the checkpoints before it are what they were.
"""

from __future__ import annotations

import datetime
import errno
import io
import json
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor

from or1_megatron.errors import Or1Error
from or1_megatron.parallel.collective_errors import AgreedError, raise_together
from or1_megatron.parallel.lockstep import LockstepError
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.shard_files import LocalShard, TensorSlice, WrittenSlice, write_metadata, write_slices
from or1_megatron.parallel.sharded_state import local_shards, optimizer_step
from or1_megatron.runtime.files import PARTIAL_SUFFIX
from or1_megatron.runtime.manifest import FileEntry, write_manifest
from or1_megatron.runtime.run_folder import LOOP_STATE, put_in_place

log = logging.getLogger(__name__)

LOOP = LOOP_STATE
RANDOM = "random.pt"
COMMON = "common.pt"  # what Megatron calls the state that is not sharded
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LAST_WAIT_S = 10.0  # for a save that has been given up
_NO_ROOM_BYTES = 1 << 20  # with less than this left, a failed write is put down to it


class CheckpointError(AgreedError):
    """A checkpoint that cannot be loaded or written: names the file, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class _RankFile:
    """What one rank has written."""

    slices: list[WrittenSlice]
    file: str
    entry: FileEntry
    random: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _PendingSave:
    """One save: everything in it is a copy that training does not touch."""

    folder: Path
    slices: Sequence[tuple[TensorSlice, Tensor]]
    random: Mapping[str, Any]
    common: Mapping[str, Any]
    loop_json: str

    @property
    def aside(self) -> Path:
        return self.folder.with_name(self.folder.name + PARTIAL_SUFFIX)


class CheckpointSaver:
    """One rank's end of saving. Constructed and closed on every rank; ``finish`` tells something on rank 0 only.

    Args:
        asynchronous: write in the background; otherwise ``save`` returns when all is on disk, and needs no copy.
        timeout_s: longest time that a save may take once its state is copied.
        before_complete: called by rank 0's background thread before it completes a checkpoint: waits for what else has
            to be on disk by then, since a run that resumes from it will not do that again.
    """

    def __init__(
        self,
        policy: MegatronPolicy,
        asynchronous: bool = True,
        timeout_s: float = 1800.0,
        before_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy, self._mesh, self._before_complete = policy, policy.mesh, before_complete
        self._asynchronous, self._timeout_s = asynchronous, timeout_s
        timeout = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._mesh.world > 1 else None
        self._written_here: list[LocalShard] | None = None
        self._buffers: list[tuple[TensorSlice, Tensor]] = []
        self._thread: threading.Thread | None = None
        self._overdue = False
        self._outcome: float | CheckpointError | None = None  # seconds; None: told, or nothing to tell
        if asynchronous:
            self._copied()  # memory that is used for the first time is slow: not while the loop waits

    # -- the loop's side -----------------------------------------------------------------------------------------

    def save(self, folder: Path, loop_state: Mapping[str, Any]) -> None:
        """Copy parameters, optimizer, generators and ``loop_state`` for the checkpoint ``folder``; collective.

        ``folder`` appears whole or not at all, when ``finish`` says so; one of that name is replaced. A save that is
        still being written is waited for first: there is one set of buffers.

        Raises:
            CheckpointError: on every rank, when there is no room for it, or the save before it failed. What was there
                before stays.
        """
        problem = self._ended()
        if self._mesh.rank == 0 and problem is None:
            problem = _prepare(folder.with_name(folder.name + PARTIAL_SUFFIX), self._policy)
        raise_together(self._mesh, problem)
        self._policy.sync_parameters()
        common = {"sgd_steps": self._policy.sgd_steps, "optimizer_step": optimizer_step(self._policy)}
        loop_json = json.dumps(loop_state) if self._mesh.rank == 0 else ""
        job = _PendingSave(folder, self._copied(), random_state(), common, loop_json)
        self._outcome = None
        self._thread = threading.Thread(target=self._write, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._asynchronous:
            raise_together(self._mesh, self._ended())

    def finish(self, wait: bool) -> float | None:
        """Rank 0: seconds that the save which has completed since the last call took to write, else None.

        Args:
            wait: for a save that is still being written.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None and self._thread.is_alive() and not wait:
            return None
        if (problem := self._ended()) is not None:
            raise problem
        written_s, self._outcome = self._outcome, None
        assert not isinstance(written_s, CheckpointError)
        return written_s

    def close(self) -> None:
        """Let a running save come to its end, before the process group goes."""
        if (problem := self._ended(_LAST_WAIT_S if self._overdue else None)) is not None:
            log.error("%s", problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, LockstepError):  # with a rank gone, its part will not come
            self.close()

    def _ended(self, wait_s: float | None = None) -> CheckpointError | None:
        """Wait for the running save, if any; its failure, which rank 0 knows."""
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
        """The slices that this rank writes, copied into the buffers; without asynchrony the live tensors themselves."""
        if self._written_here is None:
            self._written_here = [shard for shard in local_shards(self._policy) if shard.is_written_here]
        live = [
            (part, tensor[part.start : part.start + part.count])
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

    # -- the background's side -----------------------------------------------------------------------------------

    def _write(self, job: _PendingSave) -> None:
        started_s = time.perf_counter()
        part: _RankFile | str
        try:
            path = job.aside / f"__{self._mesh.rank}_0.distcp"
            slices, entry = write_slices(path, job.slices)
            part = _RankFile(slices, path.name, entry, job.random)
        except Exception as error:  # rank 0 tells it, whatever it is
            log.info("rank %d could not write its part of %s", self._mesh.rank, job.folder, exc_info=True)
            part = _reason(error)
        try:
            parts = self._gathered(part)
            if self._mesh.rank == 0:
                self._before_complete()
                _complete(job, parts)
        except Exception as error:
            log.info("checkpoint %s could not be completed", job.folder, exc_info=True)
            if self._mesh.rank == 0:
                self._outcome = _not_written(job.aside, _reason(error))
        else:
            self._outcome = time.perf_counter() - started_s

    def _gathered(self, part: _RankFile | str) -> list[_RankFile | str]:
        """Every rank's part, on rank 0."""
        if self._group is None:
            return [part]
        parts: list[Any] = [None] * self._mesh.world
        dist.gather_object(part, parts if self._mesh.rank == 0 else None, dst=0, group=self._group)
        return parts


class _Failed(Or1Error):
    """Why a rank could not write."""


def _complete(job: _PendingSave, parts: Sequence[_RankFile | str]) -> None:
    """Rank 0: make one checkpoint of the ranks' files, manifest last, and rename it into place."""
    for rank, part in enumerate(parts):
        if isinstance(part, str):
            raise _Failed(part if rank == 0 else f"rank {rank}: {part}")
    done = [part for part in parts if isinstance(part, _RankFile)]
    write_metadata(job.aside, [written for part in done for written in part.slices])
    save_config(CheckpointingConfig("torch_dist"), str(job.aside))
    for name, content in ((COMMON, dict(job.common)), (RANDOM, [dict(part.random) for part in done])):
        buffer = io.BytesIO()  # torch.save to a full disk raises an error that does not say so
        torch.save(content, buffer)
        (job.aside / name).write_bytes(buffer.getvalue())
    (job.aside / LOOP).write_text(job.loop_json)
    write_manifest(job.aside, {part.file: part.entry for part in done})
    put_in_place(job.aside, job.folder)


def _prepare(aside: Path, policy: MegatronPolicy) -> CheckpointError | None:
    """An empty folder on a disk with room for the checkpoint, or why not."""
    of_a_parameter = 12 if policy.dtype is torch.float32 else 14  # bytes: it, Adam's moments, and a bf16 one's master
    needed = policy.parameter_count * of_a_parameter  # at least
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        free = _free_bytes(aside)
    except OSError as error:
        return _not_written(aside, _reason(error))
    if free < needed:
        return _not_written(aside, f"the disk is full: {free:,} bytes are free, a checkpoint takes {needed:,} or more")
    return None


def _reason(error: BaseException) -> str:
    """One line."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return "the disk is full"
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder if folder.is_dir() else folder.parent).free


def _not_written(aside: Path, reason: str) -> CheckpointError:
    """The error of a failed save, whose remains are deleted: the disk may be full."""
    full = any(os.strerror(number) in reason for number in _FULL) or _free_bytes(aside) < _NO_ROOM_BYTES
    shutil.rmtree(aside, ignore_errors=True)
    folder = aside.with_name(aside.name.removesuffix(PARTIAL_SUFFIX))
    return CheckpointError(
        f"checkpoint {folder} could not be written: {'the disk is full' if full else reason}. The checkpoints before "
        "it are intact: free some space and run the same command again to go on from the newest"
    )


def random_state() -> Mapping[str, Any]:
    """A copy of this rank's generators. Megatron's own, for dropout, are never drawn from: there is none."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
