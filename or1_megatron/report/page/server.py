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
    """Serves each request on a thread, and does nothing between requests. Unless the server listens at the loopback
    address, a request needs the token that is part of ``url``."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, feed: Feed, host: str, port: int) -> None:
        """``port``: 0 chooses a free port. Raises UserError if the server cannot listen at the port."""
        self.feed = feed
        self.token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot listen on port {port} of {host}: {error}; choose another with --port") from error
        self.url = f"http://{host}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # of a browser that went away
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0  # of a browser that sends or takes nothing

    def do_GET(self) -> None:
        url, own = urlsplit(self.path), self.server.token
        asked = dict(parse_qsl(url.query))
        here = own or urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK  # or a foreign name leads here
        if not here or not secrets.compare_digest(asked.get("token", "").encode(), own.encode()):
            return self._answer(403, b"this page needs the address that `or1 watch` printed, with its token")
        try:
            found = self.server.feed.answer(url.path, asked)
        except (OSError, LookupError, ValueError) as error:
            return self._answer(404, str(error).encode(errors="replace"))
        kind = "text/html; charset=utf-8" if url.path == "/" else "application/octet-stream"
        return self._answer(204 if found is None else 200, found or b"", kind)

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, because an open page sends a request every few seconds."""
