"""Writes a checkpoint's manifest, with the size and digest of every file, and checks the files before a load.

    {"format": 2, "files": {"loop.json": {"bytes": 812, "sha256": "9f2c..."}, ...}}

The manifest is written last. A folder without a manifest is not a complete checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from or1_verify.errors import UserError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 2
_THREADS: Final = 16  # hashing releases the GIL; a shared file system serves about this many readers well


class CheckpointDamaged(UserError, RuntimeError):
    """A file of a checkpoint is not as it was saved. The message names the first such file."""


class CheckpointUnreadable(UserError, RuntimeError):
    """A checkpoint cannot be checked now, because the disk fails or another version wrote it. It may be intact."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and digest of a file."""

    bytes: int
    sha256: str


def entry_of(path: Path) -> FileEntry:
    """Return the file's size and SHA-256 digest."""
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, known: Mapping[str, FileEntry] | None = None) -> None:
    """Write the manifest of all files in ``folder``, and flush the manifest and the folder to the disk.

    ``known`` has the entries, by name, of files that have been digested and flushed already. This function reads and
    flushes all other files.
    """
    entries = dict(known or {})
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name != MANIFEST and name not in entries:
            sync(path)
            entries[name] = entry_of(path)
    manifest = folder / MANIFEST
    files = {name: asdict(entry) for name, entry in sorted(entries.items())}
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync(manifest)
    sync(folder)


def check_manifest(folder: Path) -> None:
    """Compare every file with the manifest, first the names and sizes, which is quick, then the digests.

    Raises:
        CheckpointDamaged: the manifest or a file is missing, truncated or altered.
        CheckpointUnreadable: a file cannot be read, or the manifest has another format.
    """
    entries = read_manifest(folder)
    for name, entry in entries.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointDamaged(f"{file} is missing; the manifest lists it with {entry.bytes} bytes")
        if file.stat().st_size != entry.bytes:
            raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes; the manifest says {entry.bytes}")
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda item: _check_digest(folder / item[0], item[1]), entries.items()))


def _check_digest(path: Path, entry: FileEntry) -> None:
    """Compare one file with its manifest entry. Raises the errors of ``check_manifest``."""
    try:
        same = entry_of(path) == entry
    except OSError as error:
        raise CheckpointUnreadable(f"{path} cannot be read ({error})") from error
    if not same:
        raise CheckpointDamaged(f"{path} is corrupt: its sha256 is not the one in the manifest")


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the files that the manifest of ``folder`` lists. Raises the errors of ``check_manifest``."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointDamaged(f"{manifest} is missing: the checkpoint is incomplete, or not one of or1_megatron")
    try:
        content = json.loads(manifest.read_text())
        written_as = content["format"]
        files = {name: FileEntry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in content["files"].items()}
    except OSError as error:
        raise CheckpointUnreadable(f"{manifest} cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{manifest} is not what was written ({error!r})") from error
    if written_as != FORMAT:
        raise CheckpointUnreadable(
            f"{manifest} says format {written_as}; this version of or1_megatron reads format {FORMAT}: "
            "continue with the version that wrote it, or start from its exported model"
        )
    return files
