"""Serves the page of ``or1 watch`` over HTTP: the page itself and its feed, for reading only."""

from __future__ import annotations

import secrets
import socket
import sys
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from or1_megatron.report.page.feed import Feed
from or1_verify.errors import UserError

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address may hold the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PortTaken(UserError, OSError):
    """The server cannot listen at the address."""


class PageServer(ThreadingMixIn, TCPServer):
    """A thread per request, and no work between requests. At an address other than this machine's own, requests need a
    token, which ``url`` has."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, feed: Feed, host: str, port: int) -> None:
        """``port``: 0 for any free one. Raises PortTaken."""
        self.feed = feed
        self.token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PortTaken(f"cannot listen on port {port} of {host}: {error}; choose another with --port") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def admits(self, token: str, host: str) -> bool:
        """Return whether a request may be answered: it has the token or, where there is none, asked for this machine by
        name, which the page of another site, whose name leads here, does not."""
        if self.token:
            return secrets.compare_digest(token.encode(), self.token.encode())
        return urlsplit(f"//{host}").hostname in LOOPBACK

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # a browser that goes away is none
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0  # of a browser that sends or takes nothing

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            asked = dict(parse_qsl(url.query))
            if not self.server.admits(asked.get("token", ""), self.headers.get("Host", "")):
                return self._answer(403, b"this page needs the address that `or1 watch` printed, with its token")
            if url.path == "/":
                return self._answer(200, self.server.feed.page(), "text/html; charset=utf-8")
            packet = self.server.feed.answer(url.path.removeprefix("/data/"), asked)
        except (OSError, LookupError, ValueError) as error:
            return self._answer(404, str(error).encode(errors="replace"))
        if packet is None:
            return self._answer(204, b"")
        return self._answer(200, packet, "application/octet-stream")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "or1"

    def log_message(self, *_: object) -> None:
        """Say nothing: a page in view asks every few seconds."""
