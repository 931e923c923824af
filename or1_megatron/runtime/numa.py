"""Binds a rank to the CPU cores beside its GPU, so that page-locked memory is on the GPU's NUMA node.

On a node with several sockets, copies between a GPU and the memory of another socket cross the link between them.
"""

from __future__ import annotations

import os
from pathlib import Path

SYS = Path("/sys")


def near_cpus(pci_address: str, sys: Path = SYS) -> frozenset[int]:
    """Return the cores beside a PCI device (``0000:1b:00.0``), as Linux reports them; empty if it does not."""
    try:
        told = (sys / "bus/pci/devices" / pci_address.lower() / "local_cpulist").read_text().strip()
    except OSError:  # a virtual machine may hide it
        return frozenset()
    found: set[int] = set()
    for part in filter(None, told.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def bind_near(pci_address: str, sys: Path = SYS) -> frozenset[int]:
    """Let this thread, and the threads and processes that it starts from now on, run on those cores only.

    Cores that the process may not use are left out (cpusets, taskset). Where none is left, nothing changes. Returns the
    cores that it may use.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    near = near_cpus(pci_address, sys) & allowed
    if near:
        os.sched_setaffinity(0, near)
    return near or allowed
