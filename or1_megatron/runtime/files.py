"""Atomic file writes, appends of whole lines, and, for a full disk, an error that names the file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from or1_verify.errors import UserError

PARTIAL_SUFFIX = ".partial"
"""The end of the name of every file that is still being written. A killed process may leave such files."""

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
}


class DiskFullError(UserError, OSError):
    """No space or quota is left to write ``filename``, or its file system is read-only."""


@contextmanager
def naming_disk_full(path: Path, what: str) -> Iterator[None]:
    """Raise DiskFullError in place of the block's OSError if the disk is full, the quota is used up or the file system
    is read-only. The message names ``path`` and ``what`` was being written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFullError) or error.errno not in _REASONS:
            raise
        mend = "Choose another place" if error.errno == errno.EROFS else "Free some space"
        raise DiskFullError(
            error.errno,
            f"{_REASONS[error.errno]}: could not write {what}. What was saved before is intact. {mend} and run the "
            "same command again",
            str(path),
        ) from error


@contextmanager
def replaced(path: Path, what: str) -> Iterator[Path]:
    """Yield the path of a file for the block to write, and then replace ``path`` by this file atomically.

    If the block raises, the old file stays. Raises DiskFullError in place of an OSError for a full disk.
    """
    aside = path.with_name(path.name + PARTIAL_SUFFIX)
    with naming_disk_full(path, what):
        try:
            yield aside
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)  # frees the space, which a checkpoint may still need
            raise


def write_atomically(path: Path, content: bytes, what: str) -> None:
    """Replace the file at ``path`` by ``content`` atomically, once ``content`` is on the disk. Raises DiskFullError."""
    with replaced(path, what) as aside, aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_whole(fd: int, content: bytes) -> None:
    """Append ``content`` to a file opened for appending. If that fails, cut off the part that was written and raise."""
    before = os.fstat(fd)
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        if stat.S_ISREG(before.st_mode):  # a device or pipe cannot be cut
            os.ftruncate(fd, before.st_size)
        raise
