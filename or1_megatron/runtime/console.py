"""Keeps a process alive when its standard output or error fails: closed terminal or pipe, full disk, stuck reader."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 5.0
"""How long a write waits for a reader that does not read, such as a terminal after Ctrl-S."""


class _Console(io.FileIO):
    """A file descriptor whose writes never fail and never block for long; output that cannot be written is lost."""

    _lost = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            if select.select((), (self,), (), 0.0 if self._lost else _PATIENCE_S)[1]:
                written = super().write(data)
                self._lost = False
                return written or size
            why = f"not read for {_PATIENCE_S:g} s"
        except (OSError, ValueError) as error:
            why = str(error)
        if not self._lost:
            self._lost = True
            # As information: a warning would go to the console.
            logger.info("the console takes no lines any more: %s; the run goes on", why)
        return size


def outlive_console() -> None:
    """Replace standard output and error so that no failure of them ends this process. Closed streams become /dev/null.

    A stream that a test or a notebook has replaced stays as it is.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free: fd
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not (before := getattr(sys, f"__{name}__")):
            continue
        # The number of a stream that was closed at the start may belong to another file now.
        own, encoding = (os.open(os.devnull, os.O_WRONLY), "utf-8") if before is None else (os.dup(fd), before.encoding)
        raw = io.BufferedWriter(_Console(own, "w"))
        setattr(sys, name, io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True))


def native_lines_to(log: Path) -> None:
    """Append what C++ code and child processes write to standard error to the file ``log``.

    Call ``outlive_console`` first: it gives Python's lines another descriptor, so that they still reach the console.
    """
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
