"""A checkpoint's manifest: every file with its size and digest, written last, compared before anything is loaded.

    {"format": 2, "files": {"loop.json": {"bytes": 812, "sha256": "9f2c..."}, ...}}

A folder without a manifest is not a finished checkpoint.
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

from or1_megatron.errors import UserError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 2
_THREADS: Final = 16  # hashing leaves the interpreter free: as many as a shared file system likes to serve


class CheckpointDamaged(UserError, RuntimeError):
    """A checkpoint's files are not those that were saved; the message names the first that is not."""


class CheckpointUnreadable(UserError, RuntimeError):
    """A checkpoint that cannot be judged here and now: the disk does not give it, or another version wrote it.

    No reason to pass it over: it may well be intact.
    """


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest knows of a file."""

    bytes: int
    sha256: str


def entry_of(path: Path) -> FileEntry:
    """Read the file and digest it."""
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, known: Mapping[str, FileEntry] | None = None) -> None:
    """Write the manifest of all files in ``folder`` and sync it and the folder.

    Args:
        known: entries, by name, of files whose writers have digested and synced them; the others are read and synced.
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


def check_manifest(folder: Path, digests: bool = True) -> None:
    """Compare every file with the manifest; without ``digests`` only which there are and their sizes, which is quick.

    Raises:
        CheckpointDamaged: the manifest or a file is missing, cut or altered.
        CheckpointUnreadable: one cannot be read, or the manifest is of another format.
    """
    entries = read_manifest(folder)
    for name, entry in entries.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointDamaged(f"{file} is missing; the manifest lists it with {entry.bytes} bytes")
        if file.stat().st_size != entry.bytes:
            raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes; the manifest says {entry.bytes}")
    if digests:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            for file, same in pool.map(lambda item: _compared(folder / item[0], item[1]), entries.items()):
                if not same:
                    raise _corrupt(file)


def check_digest(path: Path, entry: FileEntry) -> None:
    """Compare one file with what its manifest says. Raises CheckpointDamaged, CheckpointUnreadable."""
    if not _compared(path, entry)[1]:
        raise _corrupt(path)


def _corrupt(path: Path) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} is corrupt: its sha256 is not the one in the manifest")


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The files of a checkpoint. Raises CheckpointDamaged, CheckpointUnreadable."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointDamaged(f"{manifest} is missing: the checkpoint was not finished, or is not one of ours")
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
            "go on with the version that wrote it, or start from its exported model"
        )
    return files


def _compared(file: Path, entry: FileEntry) -> tuple[Path, bool]:
    """(the file, whether it is the one that was saved). Raises CheckpointUnreadable."""
    try:
        return file, entry_of(file) == entry
    except OSError as error:
        raise CheckpointUnreadable(f"{file} cannot be read ({error})") from error
