"""What makes a conversion safe to kill: files are written aside, and a journal says which are done.

The journal begins with a fingerprint of what is converted and how. The same command finds it and goes on after the last
file that was brought to the disk; another command, or a source that has changed meanwhile, begins anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from or1_megatron.errors import UserError
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full, write_atomically
from or1_megatron.runtime.manifest import sync

JOURNAL: Final = "conversion.json"
_LOCK: Final = "conversion.lock"
_THREADS: Final = 4  # some of them wait for the disk
_SPARE_BYTES: Final = 64 << 20  # for headers, tokenizer, metadata


class ConvertError(UserError, RuntimeError):
    """A conversion that cannot be made: says which file or tensor, what was found and what was expected."""


class OtherThreadFailed(UserError):
    """Another thread of this conversion has failed."""


class Job:
    """One conversion's output folder while it is being written; a context. The folder appears whole or not at all.

    Args:
        of: what is converted and how, JSON values; with another one nothing is gone on with.
        total_bytes: about what will be written.

    Raises:
        ConvertError: ``out`` exists, another conversion is writing it, or the disk has no room for it.
    """

    def __init__(self, out: Path, of: Mapping[str, Any], total_bytes: int, console: Console) -> None:
        self.out = out
        self._outer = out.with_name(out.name + PARTIAL_SUFFIX)
        self.aside = self._outer / "whole"
        """Where the files are written."""
        self.done: dict[str, Any] = {}
        """What is known of each finished file, by name."""
        self._fingerprint = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()
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
        self._go_on()
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

    def _go_on(self) -> None:
        journal = self._outer / JOURNAL
        said = None
        try:
            said = json.loads(journal.read_text())
            if said["of"] == self._fingerprint:
                self.done = {name: known for name, known in said["done"].items() if (self.aside / name).is_file()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # none, or not ours: begin anew
        if self.done:
            self._console.print(f"going on with {self._outer}: {len(self.done)} files are done")
        elif said is not None and said.get("done"):
            self._console.print(f"{self._outer} is of another conversion, or its source has changed: beginning anew")
        for path in self.aside.iterdir():
            if path.name not in self.done:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def finished(self, name: str, known: Any) -> None:
        """Take note that a file is whole and on the disk."""
        with self._mutex:
            self.done[name] = known
            content = json.dumps({"of": self._fingerprint, "done": self.done}).encode()
            write_atomically(self._outer / JOURNAL, content, "the conversion's journal")

    def write(
        self, names: Sequence[str], sizes: Sequence[int], one: Callable[[str, Callable[[int], None]], None]
    ) -> None:
        """Write those files that are not done, several at a time.

        Args:
            one: writes the file of a name, telling how many bytes it has just written, and calls ``finished``.
        """
        left = [name for name in names if name not in self.done]
        with naming_disk_full(self.out, "the converted model"), self.progress("writing", sum(sizes)) as advance:
            advance(sum(size for name, size in zip(names, sizes, strict=True) if name in self.done))
            self.each(left, lambda name: one(name, advance))

    def each(self, items: Iterable[Any], one: Callable[[Any], None]) -> None:
        """Do something to every item, several at a time; the first failure ends it all, and is raised."""
        with ThreadPoolExecutor(_THREADS) as pool:
            futures = [pool.submit(one, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # Ctrl-C, too, must not wait for gigabytes
                failed = [f for f in futures if f.done() and f.exception() is not None]
                if failed or any(not f.done() for f in futures):
                    self._stopped.set()
                    for future in futures:
                        future.cancel()
        for error in (f.exception() for f in failed):
            if not isinstance(error, OtherThreadFailed):
                raise error  # type: ignore[misc]

    def progress(self, what: str, total_bytes: int) -> _Bar:
        return _Bar(what, total_bytes, self._console, self._stopped)

    def put_in_place(self) -> None:
        """Give the folder its name; all in it is on the disk."""
        sync(self.aside)
        self.aside.rename(self.out)
        sync(self.out.parent)
        shutil.rmtree(self._outer)


class _Bar:
    """A bar with bytes, rate and the time that is left; entered, it gives what advances it, from any thread."""

    def __init__(self, what: str, total_bytes: int, console: Console, stopped: threading.Event) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        self._bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task(what, total=total_bytes)
        self._stopped = stopped

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return self._advance

    def _advance(self, count: int) -> None:
        if self._stopped.is_set():
            raise OtherThreadFailed
        self._bar.advance(self._task, count)

    def __exit__(self, *args: object) -> None:
        self._bar.stop()
