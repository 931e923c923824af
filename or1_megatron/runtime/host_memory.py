"""The memory that this process can use: the machine's, or its cgroup's where that has a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. ``free`` counts memory that the kernel gives back when it is asked for, such as page cache."""

    total: int
    free: int


def memory_metrics() -> dict[str, float]:
    """Return the memory in use here and, on a GPU, the most that torch has held since the last call, in bytes."""
    import torch  # here, because the RolloutManager reads its cgroup alone

    host = host_memory()
    metrics = {"memory/host": float(host.total - host.free)}
    if torch.cuda.is_available():
        metrics["memory/gpu"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return metrics


def host_memory(mounts: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> HostMemory:
    """Return the least of the machine's memory and the limits of this process's cgroups, v1 and v2."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for folder, unified in memory_cgroups(mounts, membership, up_to_root=True):
        limit_file, usage_file, cache = (
            ("memory.max", "memory.current", "inactive_file")
            if unified
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        try:
            limit, used = int((folder / limit_file).read_text()), int((folder / usage_file).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the root has no limit, and v2 writes "max" for none
            continue
        total = min(total, limit)
        free = min(free, max(0, limit - used + int(statistics.get(cache, 0))))
    return HostMemory(total, free)


def memory_cgroups(mounts: Path, membership: Path, up_to_root: bool) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's memory cgroups, and whether they are v2; with ``up_to_root`` those above too.

    In a container ``membership`` may give the host's path, absent below ``mounts``; only the root then counts.
    """
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        root = mounts / "memory" if controllers else mounts
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, not controllers
            if folder == root or not up_to_root:
                break
