"""Shared memory between processes: who maps it reads what was written, and nothing outlives the processes.

That a transport is built on it is test_transfer's; here processes are killed. Not tried: other users, containers.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from or1_megatron.handoff.failures import HandoffError
from or1_megatron.handoff.transport.shared_memory import HostSharedMemory

HOLDER = """
import sys, pickle, base64, torch
from or1_megatron.handoff.transport.shared_memory import HostSharedMemory
memory = HostSharedMemory()
buffer = memory.allocate(1 << 20)
buffer.copy_(torch.arange(1 << 20) % 251)
print(base64.b64encode(pickle.dumps(memory.describe(buffer))).decode(), flush=True)
sys.stdin.readline()
"""


def mapped_here(inode: int) -> bool:
    """Whether this process maps the piece of shared memory that has this inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) and "memfd:or1-handoff" in line for line in lines)


def is_open(descriptor: int, inode: int) -> bool:
    """Whether a descriptor of this process is still that piece's; its number may have been given away again."""
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def test_killed_sender_leaves_nothing_behind() -> None:
    """What the receiver has mapped stays readable while it does; then nobody holds it, and it never had a name."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    description = pickle.loads(base64.b64decode(holder.stdout.readline()))
    assert description[0] == holder.pid
    piece = os.stat(f"/proc/{holder.pid}/fd/{description[1]}")
    assert piece.st_nlink == 0
    memory = HostSharedMemory()
    mapped = memory.map(description)
    assert memory.map(description) is mapped  # once for all messages
    holder.kill()
    holder.wait()
    assert torch.equal(mapped, (torch.arange(1 << 20) % 251).to(torch.uint8))
    assert mapped_here(piece.st_ino)
    del mapped
    memory.free()
    assert not mapped_here(piece.st_ino)
    with pytest.raises(HandoffError, match=rf"cannot map the memory of process {holder.pid} .*on one node"):
        memory.map(description)


def test_free_gives_the_memory_back() -> None:
    memory = HostSharedMemory()
    buffers = [memory.allocate(1 << 16) for _ in range(3)]
    descriptors = [memory.describe(buffer)[1] for buffer in buffers]
    inodes = [os.fstat(descriptor).st_ino for descriptor in descriptors]
    assert len(set(inodes)) == 3 and all(map(mapped_here, inodes))
    del buffers
    memory.free()
    assert not any(map(mapped_here, inodes))
    assert not any(map(is_open, descriptors, inodes))
