"""Which interface gloo uses on a host whose name resolves to the loopback or to nothing; which cores a rank runs on.

Not proven: that two hosts then connect, that the cores make copies faster, and that torch reports a GPU's address as
/sys names it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from or1_megatron.runtime.world import choose_gloo_interface
from or1_verify.errors import UserError


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The first of two nodes; its name resolves to 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    return monkeypatch


def own_interface() -> tuple[str, str]:
    """Return (name, IPv4 address) of an interface of this machine; skip without a network."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if name in up and one.family == socket.AF_INET and not one.address.startswith("127."):
                return name, one.address
    pytest.skip("this machine has no network interface")


@pytest.mark.parametrize("resolves", [True, False])
def test_the_interface_towards_the_master_is_taken(node: pytest.MonkeyPatch, resolves: bool) -> None:
    """Here the master is this host itself, under the address that others use."""

    def fail(name: str) -> str:
        raise socket.gaierror(f"{name}: name or service not known")

    if not resolves:
        node.setattr(socket, "gethostbyname", fail)
    name, address = own_interface()
    node.setenv("MASTER_ADDR", address)
    node.setenv("GLOO_SOCKET_IFNAME", "restored after the test")
    node.delenv("GLOO_SOCKET_IFNAME")
    choose_gloo_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == name


def test_a_master_whose_own_name_is_the_loopback_is_refused(node: pytest.MonkeyPatch) -> None:
    """The first node, where MASTER_ADDR is its own name: nothing says over which interface the others come."""

    def resolve(name: str, port: int, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", port))]

    node.setattr(socket, "getaddrinfo", resolve)
    node.setenv("MASTER_ADDR", "here")
    with pytest.raises(UserError, match=r"here resolves to 127\.0\.1\.1, .* set GLOO_SOCKET_IFNAME to the interface"):
        choose_gloo_interface()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LOCAL_WORLD_SIZE", "16"), ("MASTER_ADDR", "127.0.0.1"), ("GLOO_SOCKET_IFNAME", "ib0"), ("address", "10.0.0.7")],
)
def test_nothing_else_is_changed(node: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """One node; several pretended on one host; the user's own choice; a name with an address of the network."""
    node.setenv("MASTER_ADDR", "here")
    if variable == "address":
        node.setattr(socket, "gethostbyname", lambda name: value)
    else:
        node.setenv(variable, value)
    before = dict(os.environ)
    choose_gloo_interface()
    assert dict(os.environ) == before


BIND = """
import os, sys
from pathlib import Path
from or1_megatron.runtime.world import bind_near
bind_near("0000:1b:00.0", Path(sys.argv[1]))
if child := os.fork():
    os.waitpid(child, 0)
print(sorted(os.sched_getaffinity(0)), flush=True)
"""


@pytest.mark.parametrize("listed", ["{mine},5000-5001", "5000", "", None])
def test_a_process_and_what_it_starts_run_beside_the_device(tmp_path: Path, listed: str | None) -> None:
    """A rank takes the listed core that it may use; without any, or without a list, nothing changes."""
    everywhere = sorted(os.sched_getaffinity(0))
    if listed is not None:
        (tmp_path / "0000:1b:00.0").mkdir()
        (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(listed.format(mine=everywhere[-1]) + "\n")
    done = subprocess.run([sys.executable, "-c", BIND, str(tmp_path)], capture_output=True, text=True)
    expected = everywhere[-1:] if listed and "mine" in listed else everywhere
    assert done.stdout.splitlines() == [str(expected)] * 2, done.stderr


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
    assert done == [1, "0000:1b:00.0", "cpu:gloo,cuda:nccl"]
