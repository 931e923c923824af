"""JSON-lines files (such as metrics.jsonl): written by whole lines, repaired after a kill, merged by step."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from or1_megatron.runtime.files import append_whole, naming_disk_full, write_atomically

logger = logging.getLogger(__name__)


class JsonlWriter:
    """Appends rows to a file, each by one write of a whole line, so that kill -9 loses no row written before.

    Opening the file cuts off an incomplete last line of an earlier process. When the disk is full, the part of the new
    line that was written is cut off and DiskFullError names the file. Earlier rows stay readable.
    """

    def __init__(self, path: Path, what: str = "metrics") -> None:
        """``what``: the name of the rows in the error for a full disk."""
        self.path, self._what = path, what
        with naming_disk_full(path, what):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if stat.S_ISREG(os.fstat(self._fd).st_mode):  # a device or pipe cannot be read back
            self._repair()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. Floats that JSON cannot express (NaN, infinities) become null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        line = json.dumps(finite, allow_nan=False)
        with naming_disk_full(self.path, self._what):
            append_whole(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _repair(self) -> None:
        """If the last line lacks its newline, append the newline (where the line is JSON), or cut off the line."""
        size = start = os.fstat(self._fd).st_size
        tail = b""
        while start > 0 and b"\n" not in tail:
            step = min(start, 1 << 16)
            start -= step
            tail = os.pread(self._fd, step, start) + tail
        torn = tail.rpartition(b"\n")[2]
        if _parse(torn) is not None:
            os.write(self._fd, b"\n")
        elif torn:
            logger.warning("%s: an interrupted write tore the last line; cut off its %d bytes", self.path, len(torn))
            os.ftruncate(self._fd, size - len(torn))


def read_rows(path: Path, bad_lines: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file in order, without an incomplete last line (a write was killed or is under way).

    If the list ``bad_lines`` is given, lines that are no JSON object are skipped, and the list gets a message for each.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: without ``bad_lines``, a line that is not a JSON object. The message names file and line.
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
    """Return the rows of metrics.jsonl by step, later rows of a step merged into earlier ones. Raises as read_rows."""
    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        steps.setdefault(int(row["step"]), {}).update(row)
    return dict(sorted(steps.items()))


class GrowingSteps:
    """Reads a file of steps that grows, such as metrics.jsonl: each call reads only what was appended."""

    def __init__(self, path: Path) -> None:
        self._path, self._end, self._last = path, 0, b""  # end of the last whole line that was read, and the line
        self._steps: dict[int, dict[str, float | None]] = {}

    def read(self) -> dict[int, dict[str, float | None]]:
        """Return the numbers of all rows by step; {} without a file. Lines that are no rows are left out, and an
        incomplete last line is read by a later call. A file that a resume has cut is read from its start."""
        with open(self._path if self._path.is_file() else os.devnull, "rb") as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._end, self._last, self._steps = file.seek(0), b"", {}
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._end, self._last, row = self._end + len(line), line, _parse(line) or {}
                if isinstance(step := row.get("step"), int):
                    numbers = {
                        sys.intern(name): x for name, x in row.items() if x is None or isinstance(x, (int, float))
                    }
                    self._steps[step] = self._steps.get(step, {}) | numbers
        return dict(sorted(self._steps.items()))


def keep_rows(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Rewrite the file atomically with only the rows for which ``keep`` is true."""
    kept = "".join(json.dumps(row) + "\n" for row in read_rows(path) if keep(row))
    write_atomically(path, kept.encode(), "metrics")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
