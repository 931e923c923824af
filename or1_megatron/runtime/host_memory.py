"""Host memory, total and free, that this process can use under its cgroup's limits; makes glibc return freed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_LARGE_BYTES: Final = 8 << 20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory in bytes. ``free`` includes memory that the kernel gives back on demand, such as page cache."""

    total: int
    free: int


def memory_metrics() -> dict[str, float]:
    """Return the host memory in use and, on a GPU, torch's peak memory since the last call, in bytes."""
    import torch  # here, because the RolloutManager reads its cgroup alone

    host = host_memory()
    metrics = {"memory/host": float(host.total - host.free)}
    if torch.cuda.is_available():
        metrics["memory/gpu"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return metrics


def host_memory(mounts: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> HostMemory:
    """Return the machine's memory, lowered to the limits of this process's cgroups (v1 and v2)."""
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
    """Yield (folder, whether it is v2) for each of this process's memory cgroups; if ``up_to_root``, also for parents.

    In a container, ``membership`` may name a path of the host that ``mounts`` lacks; then only the root has files.
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


def return_large_blocks() -> None:
    """Make glibc, where it is the C library, return freed blocks of 8 MiB and more to the system at once.

    By default glibc raises this limit to 32 MiB. Smaller freed blocks then stay in its heap, as holes that are too
    small for later blocks: a trainer rank of a 0.1B model grew by 1.2 GiB in an update and did not shrink afterwards.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)  # glibc's own largest value; the call above fixes it at 128 KiB
