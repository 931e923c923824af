"""Trackers give each step's metrics to other programs: TensorBoard, W&B, MLflow, Prometheus, or a user's class."""

from __future__ import annotations

import importlib.util
import inspect
import io
import logging
import netrc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from or1_megatron.config.resume import leaves
from or1_megatron.runtime.files import append_whole, naming_disk_full
from or1_megatron.schemas.metrics import METRICS
from or1_verify.custom_process import by_path
from or1_verify.errors import UserError

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

    from or1_megatron.config.schema import TrackConfig
    from or1_megatron.interfaces import Tracker

_CLOSING_S: Final = 30.0
_MakeTracker = Callable[[Path, Mapping[str, Any]], "Tracker"]  # takes the run's folder and resolved configuration

logger = logging.getLogger(__name__)


class _RecordFile(io.FileIO):
    """The file of TensorBoard's RecordWriter: every record is written to the kernel at once, whole or not at all."""

    def write(self, record: Any) -> int:
        append_whole(self.fileno(), record)
        return len(record)


class TensorBoardTracker:
    """Writes scalars as TensorBoard event files in the calling thread: a step is one record of a few kilobytes.

    torch's SummaryWriter is not used: it hides the first "disk full" in its thread, and takes seconds to import.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """``first_step``: the first step to be written. TensorBoard ignores earlier files' events from this step on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000:017d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        with naming_disk_full(self._path, "TensorBoard events"):
            self._file = _RecordFile(self._path, "ab")
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
    """Raise UserError if Weights & Biases' package or key is missing. No server is asked."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # a folder of that name, as W&B makes them, is no package
        raise UserError("the package wandb is not installed")
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if not (known or os.environ.keys() & {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"}):
        raise UserError(f"no key for {host} is known")


class WandbTracker:
    """Logs metrics to Weights & Biases; used if ``track.wandb_project`` is set."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Begin or resume the W&B run of this folder."""
        wandb = importlib.import_module("wandb")
        id_file = folder / "wandb_id"
        known = id_file.read_text().strip() if id_file.exists() else None
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            name=folder.name,
            config=dict(config),
            id=known,
            resume="allow" if known else None,
        )
        if known is None:
            id_file.write_text(self._run.id)
        self.next_step: int = self._run.step  # after a resume: the step after W&B's last

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def check_mlflow(experiment: str) -> None:
    """Check that the store of MLFLOW_TRACKING_URI answers. Raises what MLflow and the store's libraries raise."""
    store = urlsplit(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if store.scheme in ("http", "https"):  # MLflow itself would try for minutes
        port = store.port or socket.getservbyname(store.scheme)
        socket.create_connection((store.hostname or "", port), timeout=10).close()
    importlib.import_module("mlflow").search_experiments(max_results=1)


class MlflowTracker:
    """Logs metrics to MLflow; used if ``track.mlflow_experiment`` is set."""

    def __init__(self, experiment: str, folder: Path, config: Mapping[str, Any]) -> None:
        """Begin or resume the MLflow run of this folder."""
        self._mlflow = importlib.import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        id_file = folder / "mlflow_id"
        if not id_file.exists():
            where = self._mlflow.set_experiment(experiment).experiment_id
            new = self._client.create_run(where, run_name=folder.name).info.run_id
            self._mlflow.log_params(leaves(dict(config)), synchronous=True, run_id=new)
            id_file.write_text(new)
        self._id = id_file.read_text().strip()
        there = self._client.get_metric_history(self._id, "time/step")
        self.next_step: int = max((metric.step for metric in there), default=-1) + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        allowed = {re.sub(r"[^\w\-. :/]", "_", name): float(value) for name, value in metrics.items()}
        self._mlflow.log_metrics(allowed, step=step, synchronous=True, run_id=self._id)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class PrometheusTracker:
    """Serves the newest value of each metric to Prometheus; used if ``track.prometheus_port`` is set."""

    def __init__(self, port: int, folder: Path, config: Mapping[str, Any]) -> None:
        import prometheus_client

        self._run, registry = folder.name, prometheus_client.CollectorRegistry()
        self._gauge = lru_cache(None)(partial(prometheus_client.Gauge, labelnames=["run"], registry=registry))
        self._server, _ = prometheus_client.start_http_server(port, registry=registry)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        meanings = {prometheus_name(known.name): f"{known.meaning} ({known.unit or 'no unit'})" for known in METRICS}
        for name, value in {"step": step, **metrics}.items():
            legal = prometheus_name(name)
            self._gauge(legal, meanings.get(legal, legal)).labels(self._run).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def prometheus_name(metric: str) -> str:
    """Return a metric's name for Prometheus. For ``entropy/sampled`` this is ``or1_entropy_sampled``."""
    return "or1_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def find_tracker(path: str) -> Any:
    """Return the class that ``track.tracker`` names. Raises errors of its module; TypeError for wrong parameters."""
    kind = by_path(path)
    inspect.signature(kind).bind(Path(), {})
    inspect.signature(kind.log).bind(kind, 0, {})
    inspect.signature(kind.close).bind(kind)
    return kind


_OTHERS: Final[tuple[tuple[str, str, Callable[[str], Any], Any, str], ...]] = (
    ("W&B", "wandb_project", check_wandb, WandbTracker, "`pip install wandb`, `wandb login` or WANDB_MODE=offline"),
    ("MLflow", "mlflow_experiment", check_mlflow, MlflowTracker, "`pip install mlflow`, MLFLOW_TRACKING_URI"),
    (
        "Prometheus",
        "prometheus_port",
        lambda p: socket.create_server(("", p)).close(),
        PrometheusTracker,
        "a free port",
    ),
    ("the tracker", "tracker", find_tracker, None, "Class(run folder, configuration), log(step, metrics) and close()"),
)
"""(name, key below ``track``, check of the key's value, class (None: the check returns the class), requirements)."""


def check_trackers(track: TrackConfig) -> dict[str, _MakeTracker]:
    """Return, by name, functions that make the configured trackers. Raises UserError: a line per unusable tracker."""
    makers: dict[str, _MakeTracker] = {}
    wrong = []
    for name, key, check, kind, needed in _OTHERS:
        try:
            if (wanted := getattr(track, key)) is not None:
                makers[name] = check(wanted) or partial(kind, wanted)
        except (Exception, SystemExit) as error:  # a user's module may raise anything, and so may MLflow's store
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            wrong.append(f"track.{key}: '{wanted}' cannot be used: {why}; it needs {needed}; or leave track.{key} out")
    if wrong:
        raise UserError("\n".join(wrong))
    return makers


class BackgroundTracker:
    """Calls a tracker on a thread, so that neither a server nor a user's code delays or ends the run. The tracker's
    errors become warnings."""

    def __init__(self, name: str, make: _MakeTracker, folder: Path, config: Mapping[str, Any]) -> None:
        """Make the tracker. Raises UserError if the tracker cannot be made."""
        self._name = name
        self._calls: SimpleQueue[tuple[str, Callable[[], None]] | None] = SimpleQueue()
        try:
            self._tracker = make(folder, config)
        except Exception as error:
            raise UserError(f"{name} cannot begin: {type(error).__name__}: {error}") from error
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    def fill(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Log the rows that a killed session may not have sent: from the step in the tracker's ``next_step`` on.

        ``rows``: metrics.jsonl by step. A tracker without ``next_step`` gets no row. Rows it has are not replaced."""
        last = max(rows, default=-1)
        next_step: int = getattr(self._tracker, "next_step", last + 1)
        for step, row in rows.items():
            if step >= next_step:
                self.log(step, {name: value for name, value in row.items() if name != "step" and value is not None})
        if next_step > last + 1:
            kept = "%s keeps the killed session's rows up to step %d; the files have new ones"
            logger.warning(kept, self._name, next_step - 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._calls.put((f"take step {step}, which metrics.jsonl has", partial(self._tracker.log, step, dict(metrics))))

    def close(self) -> None:
        """Wait, for at most 30 s, until the tracker has taken the last rows."""
        self._calls.put(("be closed", self._tracker.close))
        self._calls.put(None)
        self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            logger.warning("%s has not taken its last rows within %g s", self._name, _CLOSING_S)

    def _follow(self) -> None:
        while (asked := self._calls.get()) is not None:
            try:
                asked[1]()
            except Exception as error:
                logger.warning("%s could not %s: %s: %s", self._name, asked[0], type(error).__name__, error)
