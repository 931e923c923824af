"""Estimates the disk space of a run (checkpoints, exports, rollouts) and the host memory of a GPU node, from shapes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from or1_megatron.config.schema import Config
from or1_megatron.sizing.memory import ProcessMemory, gib, offloaded_bytes, routed_bytes
from or1_megatron.weights.shape import BYTES, Shape

_PROCESS_BYTES: Final = 4 << 30
"""Assumed host memory of a process that uses a GPU: libraries, CUDA, NCCL."""


def checkpoint_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes of a checkpoint: trained weights and AdamW's fp32 state (12 per weight in fp32, 14 in bf16)."""
    return shape.trained * (12 if config.model.dtype == "float32" else 14)


def disk_bytes(config: Config, shape: Shape) -> dict[str, int]:
    """Return the most bytes that a run has on disk at one time, by kind of file.

    The checkpoints are those kept at the end of the run, and one that is being written.
    """
    kept, weights = config.checkpoint, shape.parameters * BYTES[config.model.dtype]
    forever = config.total_steps // kept.keep_every_steps if kept.keep_every_steps else 0
    exports = config.total_steps // kept.export_hf_every_steps if kept.export_hf_every_steps else 0
    return {
        "checkpoints": (kept.keep_last + kept.keep_best + 1 + forever) * checkpoint_bytes(config, shape),
        "exports": (exports + 1) * weights,
        "rollouts": config.track.rollouts_keep_bytes,
    }


def disk_room(folder: Path) -> int:
    """Return the bytes that a run may have in ``folder``: the disk's free bytes and the bytes that ``folder`` has."""
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("."))
    return shutil.disk_usage(there).free + held


def disk_short(config: Config, shape: Shape) -> str:
    """Return an error text if the run folder's disk has too little room, else ""."""
    needed, room = sum(disk_bytes(config, shape).values()), disk_room(config.run.folder)
    if needed <= room:
        return ""
    return (
        f"the run writes up to {gib(needed)}, and {config.run.folder} has room for {gib(room)}; lower "
        "checkpoint.keep_last or track.rollouts_keep_bytes"
    )


def disk_line(config: Config, shape: Shape, here: bool) -> str:
    """Return a line with the sizes of the run's files, by kind of file; if ``here``, also the room on this disk."""
    sizes = disk_bytes(config, shape)
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in sizes.items() if size)
    room = f"; {config.run.folder} has room for {gib(disk_room(config.run.folder))}" if here else ""
    return f"up to {gib(sum(sizes.values()))}: {kinds}{room}"


def node_memory(config: Config, shape: Shape, node_devices: int) -> ProcessMemory:
    """Return the host memory of a node that uses all its GPUs: trainer ranks' offloaded state, page-locked copies for
    checkpoints (up to twice the state's size), processes, and the programs that verifiers run."""
    ranks = min(node_devices, config.parallel.ranks)
    copy = -(-checkpoint_bytes(config, shape) // config.parallel.ranks)
    parts: Mapping[str, int] = {
        "offloaded state": ranks * offloaded_bytes(config, shape) if config.trainer_leaves else 0,
        "copies for checkpoints": ranks * 2 * copy if config.checkpoint.asynchronous else 0,
        "processes": 2 * ranks * _PROCESS_BYTES,
        "verified programs": config.verify.node_memory_bytes or 0,
        "routed experts": 4 * routed_bytes(config, shape),  # of the loop and the manager, if both are here
    }
    return ProcessMemory("host of a node", 1, parts)
