"""A local server with the part of the Hugging Face hub's protocol that loading a dataset needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

Repositories = Mapping[str, Mapping[str, bytes]]
"""Content of each file, by "owner/name" of the repository and by path."""


@contextmanager
def serving_hub(repositories: Repositories) -> Iterator[str]:
    """Serve the repositories within the ``with`` block, and yield the server's URL, for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path).lstrip("/")
            api = path.startswith("api/")
            _, owner, name, *rest = [*path.removeprefix("api/").split("/"), "", ""]
            rest = [part for part in rest if part]
            files = repositories.get(f"{owner}/{name}")
            if files is None:
                self._fail("RepoNotFound")
            elif not api:  # datasets/owner/name/resolve/REVISION/PATH
                content = files.get("/".join(rest[2:]))
                self._fail("EntryNotFound") if content is None else self._send(content, _etag(content))
            elif rest[:1] == ["tree"]:
                folder = "/".join(rest[2:])
                entries = _entries(files, folder)
                self._fail("EntryNotFound") if folder and not entries else self._json(entries)
            elif rest[:1] == ["paths-info"]:
                wanted = json.loads(self._body)["paths"]
                self._json([entry for entry in _entries(files, "", recursive=True) if entry["path"] in wanted])
            else:
                siblings = [{"rfilename": file} for file in files]
                self._json(
                    {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings, "private": False, "gated": False}
                )

        def _json(self, value: Any) -> None:
            self._send(json.dumps(value).encode(), None)

        def _fail(self, code: str) -> None:
            self._send(b'{"error": "not there"}', None, 404, {"X-Error-Code": code, "X-Error-Message": "not there"})

        def _send(self, body: bytes, etag: str | None, status: int = 200, more: Mapping[str, str] = {}) -> None:
            self.send_response(status)
            headers = {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **more}
            if etag is not None:
                headers |= {"ETag": f'"{etag}"'}
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _entries(files: Mapping[str, bytes], folder: str, recursive: bool = False) -> list[dict[str, Any]]:
    """Return the entries of a folder, in the form in which the hub lists them."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        if path.startswith(prefix):
            head, slash, _ = path[len(prefix) :].partition("/")
            if slash:
                entries[prefix + head] = {"type": "directory", "path": prefix + head, "oid": "0" * 40, "size": 0}
            if not slash or recursive:
                entries[path] = {"type": "file", "path": path, "oid": _etag(content), "size": len(content)}
    return list(entries.values())


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
