"""Runs a conversion: writes the new files, with a progress bar, to a folder that appears whole or not at all.

A conversion that is killed leaves a folder ``OUT.partial``; the next conversion to ``OUT`` empties and reuses it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from or1_megatron.checkpoint.manifest import sync
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full
from or1_verify.errors import UserError

_THREADS: Final = 4  # some of them wait for the disk
_SPARE_BYTES: Final = 64 << 20  # for headers, tokenizer, metadata

Advance = Callable[[int], None]
"""Reports a number of bytes just written. Raises OtherThreadFailed once another thread has failed."""


class ConvertError(UserError, RuntimeError):
    """A conversion cannot be made; the message names the file or tensor, what was found and what was expected."""


class OtherThreadFailed(Exception):
    """Ends a conversion's thread after another thread has failed, or after Ctrl-C."""


class Conversion(Protocol):
    """One conversion: names the weight files to make, and writes these and all other files."""

    sizes: dict[str, int]
    """Size in bytes of each weight file, by name."""

    def write(self, path: Path, advance: Advance) -> None:
        """Write the weight file ``path``, and sync it to disk."""

    def complete(self, folder: Path) -> None:
        """Write all other files into ``folder``, after the weight files."""


def convert(conversion: Conversion, out: Path, console: Console) -> None:
    """Run a conversion, which makes the folder ``out``.

    Raises:
        ConvertError: ``out`` exists, another conversion is writing ``out``, or the disk has no room.
    """
    total_bytes = sum(conversion.sizes.values())
    with _aside(out, total_bytes + _SPARE_BYTES) as aside, naming_disk_full(out, "the converted model"):
        _write_files(conversion, aside, console)
        conversion.complete(aside)


@contextmanager
def _aside(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Make an empty folder beside ``out``, and rename it to ``out`` if the block succeeds."""
    if out.exists() or out.is_symlink():
        raise ConvertError(f"{out} exists already; remove it, or choose another folder")
    aside = out.with_name(out.name + PARTIAL_SUFFIX)
    aside.mkdir(parents=True, exist_ok=True)
    lock = os.open(aside, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConvertError(f"another conversion is writing {out}; wait for it, or end it") from None
    try:
        for path in aside.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if (free := shutil.disk_usage(aside).free) < needed_bytes:
            raise ConvertError(
                f"{out}: {needed_bytes:,} bytes are needed there and {free:,} are free; free some space, or choose a "
                "folder on another disk"
            )
        yield aside
        sync(aside)
        aside.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _write_files(conversion: Conversion, folder: Path, console: Console) -> None:
    """Write every weight file into ``folder``, in several threads, with a progress bar; raise the first failure."""
    stopped = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with (
        Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console) as bar,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        task = bar.add_task("writing", total=sum(conversion.sizes.values()))

        def advance(count: int) -> None:
            if stopped.is_set():
                raise OtherThreadFailed
            bar.advance(task, count)

        try:
            for done in as_completed(
                [pool.submit(conversion.write, folder / name, advance) for name in conversion.sizes]
            ):
                done.result()
        except BaseException:  # Ctrl-C must not wait for gigabytes either
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
