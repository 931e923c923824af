"""The folder of a run: the paths of its files, and its lock. ``checkpoint.keeper`` decides which checkpoints stay.

    config.yaml        the resolved configuration
    metrics.jsonl      one JSON object per step (docs/schemas.md)
    faults.jsonl       stalls, failures and restarts (runtime.faults)
    sessions.jsonl     when, where and with which code each session began (runtime.versions)
    alarms.jsonl       the sentence of each alarm: {step, text}
    rollouts/          step_000012.parquet
    evaluations/       step_000012.parquet: held-out responses, sampled with the weights after step 12
    checkpoints/       step_000010/ with manifest.json, written last; best -> step_000010;
                       a damaged checkpoint is renamed to step_000008.damaged
    hf/                the exported model
    summary.json       the outcome of the run
    tensorboard/       event files
    logs/              rank_0.log ..., and profiles
    timeline/          a file per process (runtime.timeline)

Names of files and folders that are still being written end in ``.partial``. The next process deletes such files
that a killed process left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from or1_megatron.runtime.files import naming_disk_full, write_atomically
from or1_megatron.runtime.jsonl import keep_rows, read_rows
from or1_verify.errors import UserError

LOOP_STATE: Final = "loop.json"
"""The file of a checkpoint that holds the loop's state: everything that is not a tensor."""

FINISHED_RESPONSES: Final = "finished_responses.pickle"
"""The file of a checkpoint that holds the responses that were sampled but not yet trained on."""

_STEP = re.compile(r"step_(\d+)")

USER_OS_ERRORS: Final = (NotADirectoryError, PermissionError, FileExistsError)
"""Errors when a folder is created at a path that the user gave. Their messages name the path."""


class RunFolderBusy(UserError, RuntimeError):
    """Another trainer writes to the run folder."""


def step_name(step: int) -> str:
    """Return ``step_000012``; names sort in the order of their steps."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint or rollout file; None for any other name, such as a partial one."""
    match = _STEP.fullmatch(path.name.removesuffix(".parquet"))
    return int(match[1]) if match else None


class RunFolder:
    """The paths of a run, and its small files: configuration and summary."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.sessions = root / "sessions.jsonl"
        self.alarms = root / "alarms.jsonl"
        self.rollouts = root / "rollouts"
        self.evaluations = root / "evaluations"
        self.checkpoints = root / "checkpoints"
        self.hf = root / "hf"
        self.summary = root / "summary.json"
        self.tensorboard = root / "tensorboard"
        self.logs = root / "logs"
        self.timeline = root / "timeline"
        self._id = root / ".id"

    @property
    def run_id(self) -> str:
        """Return the run's unique name, which its Ray actors and heartbeats carry.

        The name is made from the folder's path and a random id in the folder. The path alone is not unique between
        mount namespaces, and a copy of the folder has the same id.
        """
        name = self._id.read_text() if self._id.is_file() else ""
        digest = hashlib.blake2b(f"{self.root.resolve()}\0{name}".encode(), digest_size=8).hexdigest()
        return f"{self.root.resolve().name}-{digest}"

    def create(self) -> None:
        """Create the folder and the subfolders that are missing, except ``hf``, which the export creates.

        Raises NotADirectoryError if a file is in the way.
        """
        for folder in (self.root, self.rollouts, self.checkpoints, self.tensorboard, self.logs):
            if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
                kind = "file" if folder.exists() else "broken link"
                raise NotADirectoryError(f"run folder: {folder} is a {kind}, a folder was expected")
            with naming_disk_full(folder, "the run folder"):
                folder.mkdir(parents=True, exist_ok=True)
        if not self._id.is_file():
            write_atomically(self._id, secrets.token_hex(8).encode(), "the run's id")

    @contextmanager
    def lock(self, wait_s: float = 10.0) -> Iterator[None]:
        """Lock the folder until the block or the process ends. The lock is an flock on the file ``.lock``. The file
        holds the owner's pid and host as JSON, and is never deleted, because this would allow two owners.

        Waits up to ``wait_s``, since the last process of a killed run may still be ending. Raises RunFolderBusy, which
        names the owner.
        """
        path = self.root / ".lock"
        with naming_disk_full(path, "the run folder's lock"):
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
        with file:
            give_up_s = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= give_up_s:
                        raise RunFolderBusy(
                            f"run folder {self.root} is in use by {_owner(file.read())}; two trainers must not write "
                            "to one folder. Stop the other one, or choose another folder with --set run.dir=..."
                        ) from None
                    time.sleep(0.1)
            with naming_disk_full(path, "the run folder's lock"):
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            yield

    def write_config(self, resolved_yaml: str) -> None:
        write_atomically(self.config, resolved_yaml.encode(), "the resolved configuration")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the fields of ``schemas.SUMMARY``. Raises ValueError for numbers that JSON cannot express."""
        text = json.dumps(dict(summary), indent=2, allow_nan=False) + "\n"
        write_atomically(self.summary, text.encode(), "the run's summary")

    def read_summary(self) -> dict[str, Any]:
        """Return the summary. Raises FileNotFoundError if the run has none yet."""
        return json.loads(self.summary.read_text())

    def recorded_steps(self) -> set[int]:
        """Return the steps that have a row in metrics.jsonl or a file of rollouts."""
        rows = read_rows(self.metrics, bad_lines=[]) if self.metrics.is_file() else ()
        files = (step_of(file) for file in self.rollouts.glob("step_*"))
        return {int(row["step"]) for row in rows} | {step for step in files if step is not None}

    def truncate_after(self, step: int) -> None:
        """Delete the records after ``step``, so that a run that resumes there has each step once; -1 deletes all.

        The summary is deleted too, since the run has not ended. TensorBoard discards later steps by itself
        (``TensorBoardTracker``'s ``first_step``).
        """
        for rows in filter(Path.exists, (self.metrics, self.alarms)):
            keep_rows(rows, lambda row: int(row["step"]) <= step)
        for file in [*self.rollouts.glob("step_*"), *self.evaluations.glob("step_*")]:
            file_step = step_of(file)
            if file_step is None or file_step > step:
                file.unlink()
        self.summary.unlink(missing_ok=True)


def find_run(root: Path) -> RunFolder:
    """Return the run folder at ``root``. Raises FileNotFoundError if there is none."""
    folder = RunFolder(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no run folder {root}")
    if not any(path.exists() for path in (folder.config, folder.metrics, folder.rollouts)):
        runs = ", ".join(sorted(path.parent.name for path in root.glob("*/config.yaml")))  # such as stages
        raise FileNotFoundError(
            f"{root} is not a run folder: it has neither config.yaml nor metrics.jsonl nor rollouts/"
            + (f"; these folders in it have: {runs}" if runs else "")
        )
    return folder


def _owner(written: str) -> str:
    """Return who holds a lock, in words, from the content of the lock file."""
    try:
        owner = json.loads(written)
        pid, host = int(owner["pid"]), str(owner["host"])
    except (ValueError, KeyError, TypeError):  # the owner has taken the lock and not yet written its name
        return "another process, whose pid is not known yet"
    gone = host == socket.gethostname() and not Path("/proc", str(pid)).exists() and Path("/proc/self").exists()
    return f"pid {pid} on host {host}" + (" (ended; a process that it started still runs)" if gone else "")
