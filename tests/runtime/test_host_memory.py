"""Limits of cgroups, from folders written by hand. That a kernel enforces them is not proven here."""

from __future__ import annotations

from pathlib import Path

import psutil

from or1_megatron.runtime.host_memory import host_memory

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, cached: int, unified: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    key = "inactive_file" if unified else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{key} {cached}\n")


def test_a_limit_above_this_process_counts(tmp_path: Path) -> None:
    """v2: 64 MiB for the group above, none for our own; 48 are used there, 8 of them page cache: 24 are free."""
    member = tmp_path / "member"
    member.write_text("0::/pod/job\n")
    group(tmp_path / "pod", str(64 * MIB), 48 * MIB, 8 * MIB, unified=True)
    group(tmp_path / "pod/job", "max", 40 * MIB, 0, unified=True)
    memory = host_memory(tmp_path, member)
    assert (memory.total, memory.free) == (64 * MIB, 24 * MIB)


def test_version_1_without_a_limit_and_with_one_at_the_root(tmp_path: Path) -> None:
    """The path is the host's, which the container does not show; no limit is written as a number beyond any memory."""
    member = tmp_path / "member"
    member.write_text("3:cpuset:/\n4:memory:/docker/x\n0::/\n")
    group(tmp_path / "memory", "9223372036854771712", 3 * MIB, 0, unified=False)
    assert host_memory(tmp_path, member).total == psutil.virtual_memory().total
    group(tmp_path / "memory", str(32 * MIB), 3 * MIB, MIB, unified=False)
    assert (host_memory(tmp_path, member).total, host_memory(tmp_path, member).free) == (32 * MIB, 30 * MIB)


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    assert host_memory(tmp_path, tmp_path / "none").total == psutil.virtual_memory().total
