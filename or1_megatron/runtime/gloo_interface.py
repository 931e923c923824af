"""The network interface on which gloo listens. By default gloo listens on the address of the host's name.

That address may be the loopback (Debian writes ``127.0.1.1 NAME`` to /etc/hosts): other nodes then cannot connect.
"""

from __future__ import annotations

import os
import socket

import psutil

from or1_megatron.runtime.world import several_nodes
from or1_verify.errors import UserError

_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_gloo_interface() -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface towards MASTER_ADDR if gloo would not find it by the host's name.

    Call it before a rank joins its world. Nothing changes on one node, or where the variable is set.

    Raises:
        UserError: no interface of this host leads to MASTER_ADDR.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    # At a loopback address only ranks of this host can meet.
    if not several_nodes() or _VARIABLE in os.environ or master == "localhost" or _loopback(master):
        return
    name = socket.gethostname()
    try:
        named = socket.gethostbyname(name)
    except socket.gaierror:
        named = ""
    if named and not _loopback(named):
        return
    own = _address_towards(master)
    towards = [
        interface
        for interface, addresses in psutil.net_if_addrs().items()
        if any(each.address.partition("%")[0] == own for each in addresses)
    ]
    if not towards or _loopback(own):
        raise UserError(
            f"the host name {name} {f'resolves to {named}' if named else 'does not resolve'}, so that other nodes "
            f"cannot connect to gloo here, and MASTER_ADDR={master} is reached from {own or 'nowhere'}: set "
            f"{_VARIABLE} to the interface between the nodes, such as eth0 (`ip address` lists them)"
        )
    os.environ[_VARIABLE] = towards[0]


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _address_towards(peer: str) -> str:
    """Return this host's address on the route to ``peer``, empty without a route; no packet is sent."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:  # gaierror is one
        return ""
