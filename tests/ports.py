"""Ports for servers of tests: outside the range from which the kernel takes ports for connections and for port 0."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress


def listen() -> socket.socket:
    """Listen on a port that another process can use after this socket."""
    while True:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", 15_000 + secrets.randbelow(15_000)))


def unused_port() -> int:
    with listen() as listener:
        return int(listener.getsockname()[1])
