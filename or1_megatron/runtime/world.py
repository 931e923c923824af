"""Ranks and nodes from torchrun's environment, gloo's interface and thread, free ports, and CPU cores near a GPU."""

from __future__ import annotations

import datetime
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil

from or1_verify.errors import UserError

_VARIABLE = "GLOO_SOCKET_IFNAME"


def several_nodes() -> bool:
    """Return whether the run's ranks are on several nodes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ranks_per_node(world: int) -> int:
    """Return the number of ranks on each node of a run with ``world`` ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def bind_near(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Bind this thread, and the threads and processes that it starts from now on, to the CPU cores near a device.

    Page-locked memory is then on the NUMA node of the GPU. Nothing changes where Linux reports no such cores, or where
    this process may use none of them (cpusets, taskset).

    Args:
        pci_address: the device's address as Linux writes it: ``0000:1b:00.0``.
    """
    try:
        listed = (devices / pci_address / "local_cpulist").read_text().strip()
    except OSError:  # a virtual machine may hide it
        return
    near: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    if near := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def choose_gloo_interface() -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface towards MASTER_ADDR if gloo would not find it by the host's name.

    By default gloo listens on the address of the host's name. This may be a loopback address (Debian writes
    ``127.0.1.1 NAME`` to /etc/hosts), and other nodes cannot connect to it. Call this before the process group is
    made. Nothing changes on one node, or where the variable is set.

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
    own = address_towards(master)
    towards = [
        interface
        for interface, addresses in psutil.net_if_addrs().items()
        if any(address.address.partition("%")[0] == own for address in addresses)
    ]
    if not towards or _loopback(own):
        raise UserError(
            f"the host name {name} {f'resolves to {named}' if named else 'does not resolve'}, so that other nodes "
            f"cannot connect to gloo here, and MASTER_ADDR={master} is reached from {own or 'nowhere'}: set "
            f"{_VARIABLE} to the interface between the nodes, such as eth0 (`ip address` lists them)"
        )
    os.environ[_VARIABLE] = towards[0]


def share_gloo_thread() -> None:
    """Let one thread serve the sockets of all gloo groups that this process makes from now on.

    By default torch starts such a thread for each group, and each thread wakes 100 times a second. A policy rank and an
    engine each have some 20 groups.
    """
    from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

    interface = os.environ.get(_VARIABLE)
    device = (
        ProcessGroupGloo.create_device(interface=interface) if interface else ProcessGroupGloo.create_default_device()
    )

    class SharedThreadGloo(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedThreadGloo  # type: ignore[misc]


def free_ports(count: int) -> list[int]:
    """Return ``count`` ports of this machine that are free now."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(count)]


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def address_towards(peer: str) -> str:
    """Return this host's address on the route to ``peer``; "" without a route. No packet is sent."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:  # gaierror is an OSError
        return ""
