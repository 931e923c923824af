"""Lists the files that wheels install, from the wheels' tables of contents, without downloading whole wheels."""

from __future__ import annotations

import configparser
import io
import re
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

_PIECE_BYTES: Final = 1 << 18
_FOLDERS: Final = {"purelib": "lib", "platlib": "lib", "scripts": "bin"}


class RemoteFile(io.RawIOBase):
    """A file behind a URL, of which only the pieces that are read are fetched (HTTP range requests)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._piece, self._piece_start, self._size = self._fetch(f"bytes=-{_PIECE_BYTES}")
        self._position = 0

    def _fetch(self, span: str) -> tuple[bytes, int, int]:
        """Return (bytes, position of the first byte in the file, size of the file)."""
        request = urllib.request.Request(self._url, headers={"Range": span})
        with urllib.request.urlopen(request, timeout=60) as answer:
            content, place = answer.read(), answer.headers.get("Content-Range")
        if place is None:  # the server sends whole files only
            return content, 0, len(content)
        first, size = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", place).groups()  # type: ignore[union-attr]
        return content, int(first), int(size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, count: int = -1) -> bytes:
        end = self._size if count < 0 else min(self._size, self._position + count)
        if end <= self._position:
            return b""
        if not self._piece_start <= self._position <= end <= self._piece_start + len(self._piece):
            last = max(end, min(self._size, self._position + _PIECE_BYTES)) - 1
            self._piece, self._piece_start, _ = self._fetch(f"bytes={self._position}-{last}")
        found = self._piece[self._position - self._piece_start : end - self._piece_start]
        self._position = end
        return found


def installed_files(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Return the files that a wheel installs: by path below an environment, a text that identifies the content.

    ``lib/`` stands for the folder site-packages, ``bin/`` for the folder of commands.
    """
    found = {}
    for entry in (each for each in wheel.infolist() if not each.is_dir()):
        folder, _, rest = entry.filename.partition(".data/")
        place = f"lib/{entry.filename}"
        if rest and "/" not in folder:
            kind, _, path = rest.partition("/")
            place = f"{_FOLDERS.get(kind, kind)}/{path}"
        found[place] = f"{entry.CRC:08x}, {entry.file_size} bytes"
        if re.fullmatch(r"[^/]+\.dist-info/entry_points\.txt", entry.filename):
            points = configparser.RawConfigParser(delimiters="=")
            points.optionxform = str  # type: ignore[assignment,method-assign]
            points.read_string(wheel.read(entry).decode())
            if points.has_section("console_scripts"):
                found |= {f"bin/{name}": f"starts {what}" for name, what in points["console_scripts"].items()}
    return found


def shared_paths(files: Mapping[str, Mapping[str, str]]) -> dict[tuple[str, ...], tuple[set[str], set[str]]]:
    """Return, by packages that write the same paths, (paths with equal content, paths with different content).

    ``files``: the files of each package, as ``installed_files`` returns them.
    """
    owners: dict[str, list[str]] = defaultdict(list)
    for package in sorted(files):
        for path in files[package]:
            owners[path].append(package)
    found: dict[tuple[str, ...], tuple[set[str], set[str]]] = {}
    for path, packages in owners.items():
        if len(packages) > 1:
            differ = len({files[package][path] for package in packages}) > 1
            found.setdefault(tuple(packages), (set(), set()))[differ].add(path)
    return found
