"""What a run leaves on disk, and holds in a GPU node's host memory: estimates from shapes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from or1_megatron.config.schema import Config
from or1_megatron.sizing.memory import ProcessMemory, gib, offloaded_bytes, routed_bytes
from or1_megatron.weights.shape import BYTES, Shape

_PROCESS_BYTES: Final = 4 << 30
"""Host memory of a process that uses a GPU: libraries, CUDA, NCCL. Assumed."""


def checkpoint_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes of one checkpoint: trained weights and AdamW's fp32 state."""
    return shape.trained * (12 if config.model.dtype == "float32" else 14)


def disk_bytes(config: Config, shape: Shape) -> dict[str, int]:
    """Return the most that a run has on disk at a time, by kind.

    Checkpoints are those that retention keeps, and the one that is being written; ``keep_every_steps`` adds its own.
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
    """Return the bytes that a run may have in ``folder``: free bytes, and bytes that the folder holds."""
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("."))
    return shutil.disk_usage(there).free + held


def disk_short(config: Config, shape: Shape) -> str:
    """Return in words what the run folder's disk lacks; empty if the run fits."""
    needed, room = sum(disk_bytes(config, shape).values()), disk_room(config.run.folder)
    if needed <= room:
        return ""
    return (
        f"the run writes up to {gib(needed)}, and {config.run.folder} has room for {gib(room)}; lower "
        "checkpoint.keep_last or track.rollouts_keep_bytes"
    )


def disk_line(config: Config, shape: Shape, here: bool) -> str:
    """Return what the run writes, by kind; if ``here``, also the room in its folder on this machine."""
    sizes = disk_bytes(config, shape)
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in sizes.items() if size)
    room = f"; {config.run.folder} has room for {gib(disk_room(config.run.folder))}" if here else ""
    return f"up to {gib(sum(sizes.values()))}: {kinds}{room}"


def node_memory(config: Config, shape: Shape, node_devices: int) -> ProcessMemory:
    """Return the host memory of a full node of GPUs: the offloaded state of trainer ranks, the saver's page-locked
    copies (up to twice their size), processes, and the verifiers' programs."""
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
