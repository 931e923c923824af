"""Cgroups (v2 or v1), where there are any: they limit the memory of a sandbox, and of all sandboxes of a node.

    <our own group>/or1-verify              the node's memory budget, shared by all verifiers on the node
    <our own group>/or1-verify/<pid>-<n>    one sandbox at a time; reused, since a removed group lingers in the kernel

If such groups cannot be made, only the resource limits of each process hold, and nothing limits their sum.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_NAME = "or1-verify"
_CONTROLLERS = ("memory", "pids")
_EMPTY_S = 5.0
_numbers = itertools.count()  # shared by all pools of this process, so that no two want the same group


@dataclass(slots=True)
class Cgroup:
    """One cgroup. ``folders``: its folder for each controller; v2 has one folder for all. Not thread-safe."""

    folders: dict[str, Path]
    unified: bool
    _written: dict[str, int] = field(default_factory=dict)
    _before: Counter[str] = field(default_factory=Counter)

    def limit(self, memory_bytes: int, processes: int) -> None:
        self._write("memory", "memory.max" if self.unified else "memory.limit_in_bytes", memory_bytes)
        self._write("pids", "pids.max", processes)
        self._before = self._counts()

    def add(self, pid: int) -> None:
        """Put a process, and all that it starts later, into the group. Raises OSError if the process has ended."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def events(self) -> Counter[str]:
        """Return how often limits were met since the last call of ``limit`` or ``events``, as three counts.

        "kills": processes killed because the group, the node or the machine ran out of memory. "memory": how often the
        group reached its own memory limit. "refusals": processes and threads that the limit on their number refused.
        """
        before, self._before = self._before, self._counts()
        return self._before - before

    def remove(self) -> None:
        """Remove the group. If a last process is still ending, wait for it, 5 s at most."""
        deadline_s = time.monotonic() + _EMPTY_S
        for folder in set(self.folders.values()):
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline_s:
                        return
                    time.sleep(0.01)

    def _counts(self) -> Counter[str]:
        folder = self.folders["memory"]
        refusals = _table(self.folders["pids"] / "pids.events").get("max", 0)
        if self.unified:
            events = _table(folder / "memory.events")
            return Counter(kills=events.get("oom_kill", 0), memory=events.get("oom", 0), refusals=refusals)
        kills = _table(folder / "memory.oom_control").get("oom_kill", 0)
        return Counter(kills=kills, memory=int((folder / "memory.failcnt").read_text()), refusals=refusals)

    def _write(self, controller: str, name: str, value: int) -> None:
        if self._written.get(name) != value:
            (self.folders[controller] / name).write_text(str(value))
            self._written[name] = value


class CgroupPool:
    """The cgroups of this process's sandboxes, which are reused. Make it with ``open``."""

    def __init__(self, parents: dict[str, Path], unified: bool) -> None:
        self._parents, self._unified = parents, unified
        self._idle: list[Cgroup] = []
        self._all: list[Cgroup] = []

    @classmethod
    def open(cls, node_memory_bytes: int | None) -> CgroupPool | None:
        """Return a pool, or None if cgroups cannot be used. ``node_memory_bytes`` limits all the node's sandboxes."""
        for bases, unified in (_unified_base(), True), (_split_bases(), False):
            if not bases:
                continue
            try:
                parents = {controller: base / _NAME for controller, base in bases.items()}
                for parent in set(parents.values()):
                    parent.mkdir(exist_ok=True)
                    if unified:
                        (parent / "cgroup.subtree_control").write_text("+memory +pids")
                if node_memory_bytes is not None:
                    Cgroup(parents, unified)._write(
                        "memory", "memory.max" if unified else "memory.limit_in_bytes", node_memory_bytes
                    )
                pool = cls(parents, unified)
                pool._remove_those_of_the_dead()
                pool.release(pool.take())
            except OSError:  # we may not change it, or it lacks a controller
                continue
            return pool
        return None

    @property
    def version(self) -> int:
        return 2 if self._unified else 1

    def take(self) -> Cgroup:
        """Return a cgroup that no sandbox uses. List operations are atomic, so any thread may call this method."""
        try:
            return self._idle.pop()
        except IndexError:
            name = f"{os.getpid()}-{next(_numbers)}"
            folders = {controller: parent / name for controller, parent in self._parents.items()}
            for folder in set(folders.values()):
                folder.mkdir()
            group = Cgroup(folders, self._unified)
            self._all.append(group)
            return group

    def release(self, group: Cgroup) -> None:
        self._idle.append(group)

    def close(self) -> None:
        """Remove this process's cgroups, and the node's cgroup if no other process has groups in it."""
        for group in self._all:
            group.remove()
        self._all, self._idle = [], []
        for parent in set(self._parents.values()):
            try:
                parent.rmdir()
            except OSError:
                continue

    def _remove_those_of_the_dead(self) -> None:
        for parent in set(self._parents.values()):
            for folder in parent.iterdir():
                owner = folder.name.partition("-")[0]
                if folder.is_dir() and owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
                    try:
                        folder.rmdir()
                    except OSError:  # its sandbox is still ending
                        continue


def _unified_base() -> dict[str, Path]:
    """Return controller (memory, pids) -> folder of this process's v2 cgroup; {} unless its children get both."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            base = _existing(_MOUNT, line.removeprefix("0::"))
            handed_down = base / "cgroup.subtree_control"
            if handed_down.is_file() and set(_CONTROLLERS) <= set(handed_down.read_text().split()):
                return dict.fromkeys(_CONTROLLERS, base)
    return {}


def _split_bases() -> dict[str, Path]:
    """Return controller (memory, pids) -> folder of this process's v1 cgroup; {} if one of the two is missing."""
    bases = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for controller in set(names.split(",")) & set(_CONTROLLERS):
            bases[controller] = _existing(_MOUNT / controller, path)
    return bases if len(bases) == len(_CONTROLLERS) and all(base.is_dir() for base in bases.values()) else {}


def _existing(mount: Path, path: str) -> Path:
    """Return the folder of a cgroup. In a container that shows only its part of the tree, it is ``mount``."""
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount


def _table(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}
