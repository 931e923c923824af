"""Which interface gloo is told to use, on a host whose name resolves to the loopback or to nothing.

Not proven: that two hosts then connect.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest

from or1_megatron.runtime.gloo_interface import choose_gloo_interface
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
    up = {name for name, told in psutil.net_if_stats().items() if told.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if name in up and each.family == socket.AF_INET and not each.address.startswith("127."):
                return name, each.address
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
