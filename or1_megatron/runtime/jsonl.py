"""JSON-lines files that survive a kill: appended by whole lines, repaired when opened."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from or1_megatron.runtime.files import naming_disk_full, write_atomically

logger = logging.getLogger(__name__)

_encode = json.JSONEncoder(allow_nan=False).encode


class JsonlWriter:
    """Appends rows. Each is one write of a whole line straight to the kernel, so kill -9 loses nothing written before.

    A last line that an earlier process left torn is cut off on opening. When the disk is full, the torn part of the
    new line is taken back and DiskFullError names the file; the rows before it stay readable.
    """

    def __init__(self, path: Path, what: str = "metrics") -> None:
        """``what`` the rows are, for the error of a full disk."""
        self.path, self._what = path, what
        with naming_disk_full(path, what):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._regular = stat.S_ISREG(os.fstat(self._fd).st_mode)  # a device or pipe can be neither read back nor cut
        if self._regular:
            self._repair()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Floats that JSON does not have (NaN, infinities) become null."""
        try:
            line = _encode(dict(row)) + "\n"
        except ValueError:
            line = _encode({name: _jsonable(value) for name, value in row.items()}) + "\n"
        size = os.fstat(self._fd).st_size
        with naming_disk_full(self.path, self._what):
            try:
                rest = memoryview(line.encode())
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                if self._regular:
                    os.ftruncate(self._fd, size)
                raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _repair(self) -> None:
        """Cut off, or end, a last line without its newline."""
        size = os.fstat(self._fd).st_size
        if size == 0 or os.pread(self._fd, 1, size - 1) == b"\n":
            return
        start, tail = size, b""
        while start > 0 and b"\n" not in tail:
            step = min(start, 1 << 16)
            start -= step
            tail = os.pread(self._fd, step, start) + tail
        torn = tail.rpartition(b"\n")[2]
        if _parse(torn) is not None:
            os.write(self._fd, b"\n")
            return
        logger.warning("%s: its last line was torn by an interrupted write; %d bytes cut off", self.path, len(torn))
        os.ftruncate(self._fd, size - len(torn))


def read_rows(path: Path, bad_lines: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, in order. A torn last line (a kill, or a write going on) is left out.

    Raises FileNotFoundError, and ValueError naming file and line for any other line that is no JSON object; given
    ``bad_lines``, these are left out too, and what was to be said of them is put there.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                fault = f"{path}:{number}: expected a JSON object, found {line[:80]!r}"
                if bad_lines is None:
                    raise ValueError(fault)
                bad_lines.append(fault)


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl by step, in order: the lines of one step are merged, the later one wins. Raises as read_rows."""
    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        steps.setdefault(int(row["step"]), {}).update(row)
    return dict(sorted(steps.items()))


def keep_rows(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> int:
    """Rewrite the file, all at once, with only the rows that ``keep`` wants; returns how many were dropped."""
    rows = list(read_rows(path))
    kept = [row for row in rows if keep(row)]
    if len(kept) < len(rows):
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode(), "metrics")
    return len(rows) - len(kept)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
