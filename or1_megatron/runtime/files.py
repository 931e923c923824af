"""Files that are either whole or not there, and a full disk that says which file it hit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from or1_megatron.errors import UserError

PARTIAL_SUFFIX = ".partial"
"""Ends the name of everything that is still being written; what a killed process leaves so may be deleted."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskFullError(UserError, OSError):
    """No space, or no quota, is left for a file; ``filename`` is that file."""


@contextmanager
def naming_disk_full(path: Path, what: str) -> Iterator[None]:
    """Turn "no space left" raised inside into a DiskFullError that names ``path`` and what was being written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFullError) or error.errno not in _FULL:
            raise
        reason = "the disk quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        raise DiskFullError(
            error.errno,
            f"{reason}: could not write {what}; what was saved before is intact. "
            "Free some space and run the same command again",
            str(path),
        ) from error


def write_atomically(path: Path, content: bytes, what: str) -> None:
    """Replace ``path`` by ``content``: written aside, synced, renamed, so that a reader sees the old or the new whole.

    Raises DiskFullError (the old file stays), or any other OSError of the write.
    """
    aside = path.with_name(path.name + PARTIAL_SUFFIX)
    with naming_disk_full(path, what):
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)  # give the space back, for the checkpoint that may still have to be saved
            raise
