"""Ranks run on the cores beside their GPU: a pretended /sys, the real affinity of a process.

Not proven: that it makes copies faster, and that torch reports a GPU's address as /sys names it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from or1_megatron.runtime.numa import near_cpus

ADDRESS = "0000:1b:00.0"
BIND = """
import os, sys
from pathlib import Path
from or1_megatron.runtime.numa import bind_near
returned = bind_near("0000:1b:00.0", Path(sys.argv[1]))
child = os.fork()
if child:
    os.waitpid(child, 0)
print(sorted(returned), sorted(os.sched_getaffinity(0)), flush=True)
"""


def pretend(folder: Path, cpus: str) -> Path:
    device = folder / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(cpus + "\n")
    return folder


def test_cores_beside_a_device(tmp_path: Path) -> None:
    there = pretend(tmp_path, "0-2,96-97,7")
    assert near_cpus("0000:1B:00.0", there) == {0, 1, 2, 7, 96, 97}
    assert near_cpus("0000:43:00.0", there) == frozenset()


def bound(there: Path) -> list[str]:
    """Bind a process; return what it and a child of it say."""
    done = subprocess.run([sys.executable, "-c", BIND, str(there)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_process_and_what_it_starts_run_there(tmp_path: Path) -> None:
    """It takes that of the cores beside the device which this machine has."""
    mine = max(os.sched_getaffinity(0))
    assert bound(pretend(tmp_path, f"{mine},5000-5001")) == [f"[{mine}] [{mine}]"] * 2


@pytest.mark.parametrize("cpus", ["5000", ""], ids=["cores of another cpuset", "nothing told"])
def test_without_usable_cores_nothing_changes(cpus: str, tmp_path: Path) -> None:
    everywhere = sorted(os.sched_getaffinity(0))
    assert bound(pretend(tmp_path, cpus)) == [f"{everywhere} {everywhere}"] * 2


def test_a_rank_binds_to_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 1 of a node takes GPU 1, before it joins the others."""
    import torch

    from or1_megatron.parallel import mesh

    done: list[object] = []
    cards = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (0x0A, 0x1B)]
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(mesh, "bind_near", done.append)
    monkeypatch.setattr(mesh.dist, "init_process_group", lambda backend, **world: done.append(backend))
    mesh.start_process_group(60)
    assert done == [1, ADDRESS, "cpu:gloo,cuda:nccl"]
