"""The store and the gloo group that trainer ranks and engine ranks meet in.

They stand beside the trainer's default group (Megatron's) and vLLM's own groups: the group is built from a store of its
own and registered nowhere.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Open a store on a free port of this host, which ``address`` must name."""
    return TCPStore(address, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(address: str, port: int, timeout_s: float) -> TCPStore:
    return TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def open_group(store: TCPStore, rank: int, world_size: int, timeout_s: float) -> ProcessGroupGloo:
    """Form the group; blocks until all ranks are here.

    Listens on this host's address on the route to the store's host. gloo would otherwise listen on whatever the host
    name resolves to, which in a container may be nothing.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(store.host))]
    return ProcessGroupGloo(PrefixStore("or1-handoff", store), rank, world_size, options)


def _own_address(peer: str) -> str:
    """Return this host's address on the route to ``peer``; no packet is sent."""
    family, kind, proto, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
