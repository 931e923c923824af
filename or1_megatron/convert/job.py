"""Makes a conversion safe to kill: files are written beside the target, and a journal lists the finished ones.

The journal begins with a fingerprint of the source and the options. The same command finds it and resumes after the
last finished file; another command, or a source that has changed meanwhile, starts over.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from or1_megatron.checkpoint.manifest import sync
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full, write_atomically
from or1_verify.errors import UserError

JOURNAL: Final = "conversion.json"
_LOCK: Final = "conversion.lock"
_THREADS: Final = 4  # some of them wait for the disk
_SPARE_BYTES: Final = 64 << 20  # for headers, tokenizer, metadata

Advance = Callable[[int], None]
"""Told how many bytes have just been written or compared."""


class ConvertError(UserError, RuntimeError):
    """A conversion that cannot be made: names the file or tensor, what was found and what was expected."""


class OtherThreadFailed(UserError):
    """Another thread of this conversion has failed."""


class Conversion(Protocol):
    """One direction of conversion: the files it makes of one source."""

    sizes: dict[str, int]
    """Bytes of each weight file, by name."""

    def identity(self) -> Mapping[str, Any]:
        """Return what must be the same for a conversion to resume, as JSON."""

    def write(self, path: Path, advance: Advance) -> Any:
        """Write the weight file ``path`` and sync it. Return what ``complete`` needs to know of it, as JSON."""

    def complete(self, folder: Path, done: Mapping[str, Any]) -> None:
        """Write the other files; ``done`` is what ``write`` has returned for each weight file."""

    def comparison(self, folder: Path) -> Callable[[str, Advance], None]:
        """Return a function that compares a weight file in ``folder``, given by its name, with the source."""


def convert(conversion: Conversion, out: Path, console: Console, verify: bool) -> None:
    """Make the folder ``out``, or resume a conversion that was killed.

    Args:
        verify: read every tensor back from the disk and compare it with the source.
    """
    total_bytes = sum(conversion.sizes.values())
    with Job(out, conversion.identity(), total_bytes, console) as job:
        job.write(conversion)
        conversion.complete(job.aside, job.done)
        if verify:
            forget(job.aside / name for name in conversion.sizes)
            compare = conversion.comparison(job.aside)
            with job.progress("verifying", total_bytes) as advance:
                job.each(conversion.sizes, lambda name: compare(name, advance))
        job.put_in_place()


class Job:
    """The output folder of a conversion while it is written; a context manager. It appears whole or not at all.

    Args:
        identity: JSON values; a journal with other ones is not resumed.
        total_bytes: estimate of the bytes to write.

    Raises:
        ConvertError: ``out`` exists, another conversion is writing it, or the disk has no room for it.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], total_bytes: int, console: Console) -> None:
        self.out = out
        self._outer = out.with_name(out.name + PARTIAL_SUFFIX)
        self.aside = self._outer / "whole"
        """Where the files are written."""
        self.done: dict[str, Any] = {}
        """What is known of each finished file, by name."""
        self._fingerprint = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
        self._total_bytes, self._console = total_bytes, console
        self._mutex = threading.Lock()
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        if self.out.exists() or self.out.is_symlink():
            raise ConvertError(f"{self.out} exists already; remove it, or choose another folder")
        self.aside.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._outer / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConvertError(f"another conversion is writing {self.out}; wait for it, or end it") from None
        self._resume()
        held = sum((self.aside / name).stat().st_size for name in self.done)
        needed, free = self._total_bytes - held + _SPARE_BYTES, shutil.disk_usage(self.aside).free
        if free < needed:
            os.close(self._lock)
            if not self.done:
                shutil.rmtree(self._outer)
            raise ConvertError(
                f"{self.out}: {needed:,} bytes are needed there and {free:,} are free; free some space, or choose a "
                "folder on another disk"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def _resume(self) -> None:
        journal = None
        try:
            journal = json.loads((self._outer / JOURNAL).read_text())
            if journal["of"] == self._fingerprint:
                self.done = {name: known for name, known in journal["done"].items() if (self.aside / name).is_file()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # no journal, or not one of ours: start over
        if self.done:
            self._console.print(f"resuming {self._outer}: {len(self.done)} files are done")
        elif journal is not None and journal.get("done"):
            self._console.print(f"{self._outer} is of another conversion, or its source has changed: starting over")
        for path in self.aside.iterdir():
            if path.name not in self.done:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def write(self, conversion: Conversion) -> None:
        """Write the files that are not done yet, several at a time."""

        def write_one(name: str) -> None:
            known = conversion.write(self.aside / name, advance)
            with self._mutex:
                self.done[name] = known
                content = json.dumps({"of": self._fingerprint, "done": self.done}).encode()
                write_atomically(self._outer / JOURNAL, content, "the conversion's journal")

        left = [name for name in conversion.sizes if name not in self.done]
        with naming_disk_full(self.out, "the converted model"), self.progress("writing", self._total_bytes) as advance:
            advance(sum(size for name, size in conversion.sizes.items() if name in self.done))
            self.each(left, write_one)

    def each(self, items: Iterable[Any], one: Callable[[Any], None]) -> None:
        """Call ``one`` with every item, several at a time; the first failure ends all of them and is raised."""
        with ThreadPoolExecutor(_THREADS) as pool:
            futures = [pool.submit(one, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # Ctrl-C must not wait for gigabytes either
                failed = [f for f in futures if f.done() and f.exception() is not None]
                if failed or any(not f.done() for f in futures):
                    self._stopped.set()
                    for future in futures:
                        future.cancel()
        for error in (f.exception() for f in failed):
            if not isinstance(error, OtherThreadFailed):
                raise error  # type: ignore[misc]

    @contextmanager
    def progress(self, label: str, total_bytes: int) -> Iterator[Advance]:
        """Show a bar with bytes, rate and remaining time; gives the function that advances it, from any thread."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=self._console) as bar:
            task = bar.add_task(label, total=total_bytes)

            def advance(count: int) -> None:
                if self._stopped.is_set():
                    raise OtherThreadFailed
                bar.advance(task, count)

            yield advance

    def put_in_place(self) -> None:
        """Give the folder its name, once everything in it is on the disk."""
        sync(self.aside)
        self.aside.rename(self.out)
        sync(self.out.parent)
        shutil.rmtree(self._outer)


def forget(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
