"""Checkpoints: Megatron's sharded format, written aside, checked by a manifest, and renamed into place.

A folder holds Megatron's files (parameters and optimizer, loadable at any TP/PP/DP), ``loop.json`` (the loop's state),
``random.pt`` (each rank's generators) and, written last, ``manifest.json`` with every file's size and digest.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import queue
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from or1_megatron.parallel.agreement import AgreedError, raise_together
from or1_megatron.parallel.policy import MegatronPolicy

MANIFEST = "manifest.json"
_LOOP = "loop.json"
_RANDOM = "random.pt"
_FORMAT = 1
_WAY_OUT = "put the file back, or remove this checkpoint's folder to go on from the one before it"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM_BYTES = 1 << 20  # with less than this left, a failed write is put down to it
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


# Megatron would spawn a manager process to hold the writers' results: seconds at the first save, and a process that
# outlives a killed rank. Our saves collect the results in the process that started them.
filesystem_async._results_queue = queue.Queue()


class CheckpointError(AgreedError):
    """A checkpoint that cannot be loaded or written: names the file, what was found and what was expected."""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_manifest(folder: Path) -> None:
    entries = {}
    for path in _files(folder):
        _fsync(path)
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": _FORMAT, "files": entries}, indent=1))
    _fsync(manifest)
    _fsync(folder)


def check_manifest(folder: Path, digests: bool = True) -> None:
    """Compare every file with the manifest; without ``digests`` only which there are and their sizes, which is quick.

    Raises:
        CheckpointError: the manifest is missing or unreadable, or a file is missing, cut or altered.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint was not finished, or is not one of ours")
    try:
        entries = json.loads(path.read_text())["files"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}); {_WAY_OUT}") from error
    for name, entry in entries.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the manifest lists it with {entry['bytes']} bytes; {_WAY_OUT}")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes; the manifest says {entry['bytes']}; {_WAY_OUT}"
            )
        if digests and _digest(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is corrupt: its sha256 is not the one in the manifest; {_WAY_OUT}")


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sharded_state(policy: MegatronPolicy, is_loading: bool) -> dict[str, Any]:
    if policy.sgd_steps == 0:  # Adam's moments come into being with the first update; a save may come before it
        for optimizer in policy.optimizer.chained_optimizers:
            optimizer.init_state_fn(optimizer.optimizer)
    model = policy.network.sharded_state_dict(metadata=_METADATA)
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA),
        "sgd_steps": policy.sgd_steps,
    }


def save(policy: MegatronPolicy, folder: Path, loop_state: Mapping[str, Any]) -> None:
    """Write parameters, optimizer, generators and ``loop_state``; collective, returns when all is on disk.

    ``folder`` appears whole or not at all; a folder of that name is replaced.

    Raises:
        CheckpointError: on every rank, when it cannot be written, as on a full disk. What was there before stays.
    """
    aside = folder.with_name(folder.name + ".partial")
    raise_together(policy.mesh, _prepare(aside, policy) if policy.mesh.rank == 0 else None)
    problem = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist_checkpointing.save(
                _sharded_state(policy, is_loading=False), str(aside), validate_access_integrity=False
            )
    except CheckpointException as error:  # raised on every rank; rank 0 knows the reasons
        problem = _not_written(aside, error) if policy.mesh.rank == 0 else None
    raise_together(policy.mesh, problem)
    states: list[Any] = [None] * policy.mesh.world
    dist.all_gather_object(states, _random_state(), group=policy.mesh.control)
    raise_together(policy.mesh, _complete(aside, folder, states, loop_state) if policy.mesh.rank == 0 else None)


def _prepare(aside: Path, policy: MegatronPolicy) -> CheckpointError | None:
    """An empty folder on a disk with room for the checkpoint, or why not."""
    needed = policy.parameter_count * 3 * 4  # at least: each parameter and Adam's two moments, in fp32
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        free = _free_bytes(aside)
    except OSError as error:
        return _not_written(aside, error)
    if free < needed:
        return _not_written(aside, f"the disk is full: {free:,} bytes are free, a checkpoint takes {needed:,} or more")
    return None


def _complete(aside: Path, folder: Path, states: list[Any], loop_state: Mapping[str, Any]) -> CheckpointError | None:
    """Add what rank 0 holds, and rename; or why that failed."""
    try:
        buffer = io.BytesIO()  # torch.save to a full disk raises an error that does not say so
        torch.save(states, buffer)
        (aside / _RANDOM).write_bytes(buffer.getvalue())
        (aside / _LOOP).write_text(json.dumps(loop_state))
        _write_manifest(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _fsync(folder.parent)
    except OSError as error:
        return _not_written(aside, error)
    return None


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder if folder.is_dir() else folder.parent).free


def _not_written(aside: Path, reason: BaseException | str) -> CheckpointError:
    """The error of a failed save, whose remains are deleted: the disk may be full."""
    text = str(reason)  # the writers' errors arrive as the text of a traceback, and torch's do not say "disk full"
    full = any(os.strerror(number) in text for number in _FULL) or _free_bytes(aside) < _NO_ROOM_BYTES
    shutil.rmtree(aside, ignore_errors=True)
    if not isinstance(reason, str):
        last_line = text.strip().splitlines()[-1] if text.strip() else repr(reason)
        text = "the disk is full" if full else last_line
    folder = aside.with_name(aside.name.removesuffix(".partial"))
    return CheckpointError(
        f"checkpoint {folder} could not be written: {text}. The checkpoints before it are intact: free some space and "
        "run the same command again to go on from the newest"
    )


def load(policy: MegatronPolicy, folder: Path) -> Mapping[str, Any]:
    """Restore what save wrote, at this run's layout, and return the loop's state; collective.

    The generators are restored where the number of ranks is the same; otherwise they keep their seeds.

    Raises:
        CheckpointError: something is missing, cut or altered (found before anything is loaded).
    """
    problem = None
    if policy.mesh.rank == 0:
        try:
            check_manifest(folder)
        except CheckpointError as error:
            problem = error
    raise_together(policy.mesh, problem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(folder))
    policy.network.load_state_dict(state["model"])
    policy.optimizer.load_state_dict(state["optimizer"])
    policy.sgd_steps = int(state["sgd_steps"])
    states = torch.load(folder / _RANDOM, weights_only=False)
    if len(states) == policy.mesh.world:
        _restore_random_state(states[policy.mesh.rank])
    return dict(json.loads((folder / _LOOP).read_text()))
