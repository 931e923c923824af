"""Serves the page of ``or1 watch`` over HTTP: the page itself and its feed, for reading only."""

from __future__ import annotations

import secrets
import sys
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from or1_megatron.report.page.feed import Feed
from or1_verify.errors import UserError

LOOPBACK: Final = ("127.0.0.1", "localhost")
_HEADERS: Final = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class PageServer(ThreadingMixIn, TCPServer):
    """A thread per request, and no work between requests. At an address other than this machine's own, a request needs
    the token in ``url``."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, feed: Feed, host: str, port: int) -> None:
        """``port``: 0 for any that is free. Raises UserError if it cannot listen there."""
        self.feed = feed
        self.token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot listen on port {port} of {host}: {error}; choose another with --port") from error
        self.url = f"http://{host}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def admits(self, token: str, host: str) -> bool:
        """Return whether a request has the token or, where none is needed, asks for this machine by its own name, as
        another site's page, whose name was made to lead here, does not."""
        if self.token:
            return secrets.compare_digest(token.encode(), self.token.encode())
        return urlsplit(f"//{host}").hostname in LOOPBACK

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # of a browser that went away
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0  # of a browser that sends or takes nothing

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = dict(parse_qsl(url.query))
        if not self.server.admits(asked.get("token", ""), self.headers.get("Host", "")):
            return self._answer(403, b"this page needs the address that `or1 watch` printed, with its token")
        if url.path == "/":
            return self._answer(200, self.server.feed.page(), "text/html; charset=utf-8")
        try:
            packet = self.server.feed.answer(url.path.removeprefix("/data/"), asked)
        except (OSError, LookupError, ValueError) as error:
            return self._answer(404, str(error).encode(errors="replace"))
        return self._answer(204 if packet is None else 200, packet or b"", "application/octet-stream")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: a page in view asks every few seconds."""
