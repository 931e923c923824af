"""Trackers, which write the metrics of each step for other programs: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from or1_megatron.runtime.files import append_whole, naming_disk_full
from or1_verify.errors import UserError

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


logger = logging.getLogger(__name__)


class _UnbufferedFile:
    """The file of TensorBoard's RecordWriter: every record is written to the kernel at once, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: bytes) -> None:
        append_whole(self._fd, record)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        os.close(self._fd)


class TensorBoardTracker:
    """Scalars as TensorBoard event files, written in the calling thread: a step is one record of a few kilobytes.

    torch's SummaryWriter swallows the first "disk full" in its thread, and takes seconds to import.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """``first_step``: the next step. TensorBoard discards what earlier files hold from this step on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000:017d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        with naming_disk_full(self._path, "TensorBoard events"):
            self._file = _UnbufferedFile(self._path)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. Raises DiskFullError."""
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._write(event)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        with naming_disk_full(self._path, "TensorBoard events"):
            self._records.write(event.SerializeToString())


def check_wandb(project: str) -> None:
    """Check, without asking a server, that Weights & Biases can be used.

    Raises:
        UserError: the package or the key is missing.
    """
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # a folder of that name, as W&B makes them, is no package
        raise UserError(
            f"track.wandb_project is '{project}', but the package wandb is not installed: `pip install wandb`, or "
            "leave track.wandb_project out"
        )
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if not (known or os.environ.keys() & {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"}):
        raise UserError(
            f"track.wandb_project is '{project}', but no key for {host} is known: `wandb login`, or set WANDB_API_KEY, "
            "or WANDB_MODE=offline"
        )


class WandbTracker:
    """Weights & Biases, used if ``track.wandb_project`` is set."""

    def __init__(self, project: str, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Begin or resume the W&B run of this folder. Raises what ``check_wandb`` raises."""
        check_wandb(project)
        wandb = importlib.import_module("wandb")
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

    def fill(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Log the rows that W&B lacks: a killed session may not have sent its last ones. It keeps what it has."""
        next_step = self._run.step  # after a resume: behind the last that W&B has
        for step, row in rows.items():
            if step >= next_step:
                self.log(step, {name: value for name, value in row.items() if name != "step" and value is not None})
        if next_step > max(rows, default=next_step) + 1:
            logger.warning("W&B keeps the killed session's rows up to step %d; the files have new ones", next_step - 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
