"""Shared memory between processes: who maps it reads what was written, and nothing outlives the processes.

That a transport is built on it is test_carrying's; here processes are killed. Not tried: other users, containers.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from or1_megatron.handoff.errors import HandoffError
from or1_megatron.handoff.transport.shared_memory import HostSharedMemory

HOLDER = """
import sys, pickle, base64, torch
from or1_megatron.handoff.transport.shared_memory import SharedMemory
memory = SharedMemory()
buffer = memory.allocate(1 << 20)
buffer.copy_(torch.arange(1 << 20) % 251)
print(base64.b64encode(pickle.dumps(memory.describe(buffer))).decode(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def handoff_memory() -> Callable[[], int]:
    """Pieces of shared memory that this process maps, those left aside that other tests' errors still hold."""

    def count() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:or1-handoff")

    gc.collect()
    before = count()
    return lambda: count() - before


def test_killed_sender_leaves_nothing_behind(handoff_memory: Callable[[], int]) -> None:
    """What the receiver has mapped stays readable while it does; then it is gone, and had no name anywhere."""
    import base64
    import pickle

    named = set(os.listdir("/dev/shm"))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    description = pickle.loads(base64.b64decode(holder.stdout.readline()))
    assert description[0] == holder.pid
    memory = HostSharedMemory()
    mapped = memory.map(description)
    assert memory.map(description) is mapped  # once for all messages
    holder.kill()
    holder.wait(30)
    assert torch.equal(mapped, (torch.arange(1 << 20) % 251).to(torch.uint8))
    assert handoff_memory() == 1
    del mapped
    memory.rest()
    assert handoff_memory() == 0
    assert not {name for name in set(os.listdir("/dev/shm")) - named if "or1" in name}
    with pytest.raises(HandoffError, match=rf"cannot map the memory of process {holder.pid} .*on one node"):
        memory.map(description)


def test_memory_of_somebody_else_is_not_taken_for_it(handoff_memory: Callable[[], int]) -> None:
    """A process number that means another process here (another PID namespace), with a file under that number."""
    memory, other = HostSharedMemory(), HostSharedMemory()
    pid, descriptor, token = memory.describe(memory.allocate(4096))
    with pytest.raises(HandoffError, match="another process has this number here"):
        other.map((pid, descriptor, bytes(reversed(token))))
    memory.rest()
    other.rest()
    assert handoff_memory() == 0


def test_rest_gives_the_memory_back(handoff_memory: Callable[[], int]) -> None:
    memory = HostSharedMemory()
    before = len(os.listdir("/proc/self/fd"))
    buffers = [memory.allocate(1 << 16) for _ in range(3)]
    assert handoff_memory() == 3
    del buffers
    memory.rest()
    assert handoff_memory() == 0 and len(os.listdir("/proc/self/fd")) == before
