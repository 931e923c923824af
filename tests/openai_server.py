"""A local server with a small part of OpenAI's protocol; a function of the test makes the answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""(HTTP status, body). The body is bytes, an iterator of bytes sent one after another, or a value sent as JSON."""


def completion(text: Any, finish_reason: str = "stop", **more: Any) -> Reply:
    return 200, {
        "choices": [{"message": {"role": "assistant", "content": text, **more}, "finish_reason": finish_reason}]
    }


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[str]:
    """Run the server within the ``with`` block, and yield its URL, up to /v1. The server's only model is ``solver``.

    ``answer`` gets the body of each request, on a thread of its own, and returns the reply.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "solver"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*answer({**body, "path": self.path, "key": self.headers.get("Authorization")}))

        def _send(self, status: int, reply: Any) -> None:
            pieces = reply if isinstance(reply, Iterator) else [_encoded(reply)]
            try:
                self.send_response(status)
                if isinstance(pieces, list):
                    self.send_header("Content-Length", str(len(pieces[0])))
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)
            except OSError:  # the client has given up
                pass

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _encoded(reply: Any) -> bytes:
    return reply if isinstance(reply, bytes) else json.dumps(reply).encode()
