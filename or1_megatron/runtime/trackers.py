"""Where a step's numbers go: JSONL, TensorBoard, Weights & Biases, or all of them."""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from or1_megatron.runtime.files import naming_disk_full
from or1_megatron.runtime.jsonl import JsonlWriter

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

    from or1_megatron.interfaces import Tracker


class JsonlTracker:
    """``metrics.jsonl``: one object per call, ``step`` first, then the metrics by name (null: not finite)."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line. Raises DiskFullError."""
        self._writer.write({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def close(self) -> None:
        self._writer.close()


class _UnbufferedFile:
    """What TensorBoard's RecordWriter writes to: every record goes to the kernel at once, or is taken back whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            self._file.truncate(size)
            raise

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Scalars as TensorBoard event files, written in this thread: a step is one record of a few kilobytes.

    torch's SummaryWriter is not used: it opens a thread that swallows the first "disk full" and imports for seconds.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """``first_step``: the step that comes next; TensorBoard forgets what earlier files have from there on."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000:017d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        with naming_disk_full(self._path, "TensorBoard events"):
            self._file = _UnbufferedFile(self._path)
        self._records = RecordWriter(self._file)
        self._write(self._event(file_version="brain.Event:2"))
        self._write(self._event(step=first_step, session_start=True))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises DiskFullError."""
        self._write(self._event(step=step, scalars=metrics))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        with naming_disk_full(self._path, "TensorBoard events"):
            self._records.write(event.SerializeToString())

    @staticmethod
    def _event(
        step: int = 0,
        file_version: str | None = None,
        session_start: bool = False,
        scalars: Mapping[str, float] | None = None,
    ) -> Event:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        event = Event(wall_time=time.time(), step=step)
        if file_version:
            event.file_version = file_version
        elif session_start:
            event.session_log.status = SessionLog.START
        for name, value in (scalars or {}).items():
            event.summary.value.add(tag=name, simple_value=float(value))
        return event


class WandbTracker:
    """Weights & Biases, for who asks for it (``track.wandb_project``)."""

    def __init__(self, project: str, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Resumes the W&B run that this folder began. Raises ModuleNotFoundError saying what to install."""
        try:
            wandb = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"track.wandb_project is '{project}', and the package wandb is not installed: "
                "`pip install wandb`, or leave track.wandb_project out"
            ) from error
        id_file = folder / "wandb_id"
        known = id_file.read_text().strip() if id_file.exists() else None
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            name=name,
            config=dict(config),
            id=known,
            resume="allow" if known else None,
        )
        if known is None:
            id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Sends every row to each of its trackers, in order: put the one that must not miss a step first."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Closes all, also when one fails to; a failure is raised after."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
