"""Explains in one sentence why a call of a Ray actor failed, for example because its process ran out of memory."""

from __future__ import annotations

import re
from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from or1_megatron.runtime.host_memory import memory_cgroups

_MORE_MEMORY = (
    "lower rollout.engines, kv_cache_bytes or max_concurrent, take a smaller model, or use a machine with more memory"
)


def failure_of(error: RayError) -> str:
    """Return the error that the actor raised, or why its process is gone (memory ran out, or Ray's own reason)."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        numbers = re.search(r"was (\S+) used / (\S+) limit", text)
        used = f" ({numbers[1]} of {numbers[2]} in use)" if numbers else ""
        return f"Ray killed its process because the machine ran out of memory{used}: {_MORE_MEMORY}"
    if (kills := _kernel.new_kills()) > 0:
        count = "a process" if kills == 1 else f"{kills} processes"
        return f"its process died, and the kernel has just killed {count} for memory: {_MORE_MEMORY}"
    if detail := re.search(r"exit detail: (.*?)\.? Some common causes", text, re.DOTALL):
        return f"its process died: {detail[1]}"
    facts = [line for line in text.splitlines()[1:] if not line.startswith("\t")]  # without class, pid, address, ...
    return f"its process died: {' '.join(facts) or text}"


class KernelKills:
    """Counts the processes that the kernel's out-of-memory killer has ended since this object was made."""

    def __init__(self, proc: Path = Path("/proc"), mounts: Path = Path("/sys/fs/cgroup")) -> None:
        own = memory_cgroups(mounts, proc / "self" / "cgroup", up_to_root=False)
        counters = [folder / ("memory.events.local" if is_v2 else "memory.oom_control") for folder, is_v2 in own]
        self._counters = [*counters, proc / "vmstat"]
        self._seen = self._count()

    def new_kills(self) -> int:
        """Return how many processes were killed since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen - before

    def _count(self) -> int:
        """Count the kills in this process's cgroup, which has engines but no sandboxes; if unknown, on the machine."""
        for file in self._counters:
            try:
                counted = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            except OSError:
                continue
            if counted is not None:
                return int(counted[1])
        return 0


_kernel = KernelKills()
