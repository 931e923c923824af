"""A run's folder: what lies where, who may write to it, which checkpoints stay.

    config.yaml        the resolved configuration
    metrics.jsonl      one JSON object per step (docs/schemas.md)
    rollouts/          step_000012.parquet
    checkpoints/       step_000010/ with manifest.json, written last; best -> step_000010; damaged ones, set aside, as
                       step_000008.damaged
    dumps/             step_000012_update_0/, for or1 replay: batches whose loss or gradient was not finite
    hf/                the exported model
    summary.json       what the run came to
    tensorboard/       event files
    logs/              rank_0.log ...

Everything still being written ends in ``.partial``; what a killed process left so is deleted by the next one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from or1_megatron.errors import UserError
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full, write_atomically
from or1_megatron.runtime.jsonl import keep_rows
from or1_megatron.runtime.manifest import MANIFEST, CheckpointDamaged, check_manifest, sync

logger = logging.getLogger(__name__)

DAMAGED_SUFFIX: Final = ".damaged"
"""Ends the name of a checkpoint that was set aside because its files are not those that were saved."""

LOOP_STATE: Final = "loop.json"
"""In a checkpoint: the loop's state, that which is no tensor."""

_REPLACED_SUFFIX: Final = ".replaced"
_STEP = re.compile(r"step_(\d+)")


USER_OS_ERRORS: Final = (NotADirectoryError, PermissionError, FileExistsError)
"""Of making a folder where the user said: their own messages name the path."""


class RunFolderBusy(UserError, RuntimeError):
    """Another trainer is writing to the run folder."""


def step_name(step: int) -> str:
    """``step_000012``: sorts as the steps do."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint or rollout file is of; None for any other name, a partial one included."""
    match = _STEP.fullmatch(path.name.removesuffix(".parquet"))
    return int(match[1]) if match else None


class RunFolder:
    """Paths of a run, and the few things that are written whole: configuration and summary."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.rollouts = root / "rollouts"
        self.checkpoints = root / "checkpoints"
        self.dumps = root / "dumps"
        self.hf = root / "hf"
        self.summary = root / "summary.json"
        self.tensorboard = root / "tensorboard"
        self.logs = root / "logs"

    def create(self) -> None:
        """Make the folder and its subfolders; those already there stay. ``hf`` is made by the export.

        Raises NotADirectoryError when a file is in the way.
        """
        for folder in (self.root, self.rollouts, self.checkpoints, self.tensorboard, self.logs):
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(f"run folder: {folder} is a file, a folder was expected")
            with naming_disk_full(folder, "the run folder"):
                folder.mkdir(parents=True, exist_ok=True)

    def lock(self, wait_s: float = 10.0) -> RunLock:
        """Take the folder for this process until the lock is closed or the process ends, however it ends.

        Waits a little, for a killed run whose last process is just going. Raises RunFolderBusy naming the owner.
        """
        return RunLock(self.root, wait_s)

    def write_config(self, resolved_yaml: str) -> None:
        write_atomically(self.config, resolved_yaml.encode(), "the resolved configuration")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Fields: or1_megatron.schemas.SUMMARY. Raises ValueError for numbers that JSON does not have."""
        text = json.dumps(dict(summary), indent=2, allow_nan=False) + "\n"
        write_atomically(self.summary, text.encode(), "the run's summary")

    def read_summary(self) -> dict[str, Any]:
        """Raises FileNotFoundError while the run has none."""
        summary: dict[str, Any] = json.loads(self.summary.read_text())
        return summary

    def truncate_after(self, step: int) -> int:
        """Forget what was recorded after ``step``, from which a run resumes; returns how many metrics rows went.

        -1 forgets everything: a run that was killed before its first checkpoint starts afresh.
        Without it a resumed run would have the steps since its last checkpoint twice. TensorBoard is told by its
        tracker (``first_step``). The summary goes too: the run that it speaks of is not at its end any more.
        """
        removed = keep_rows(self.metrics, lambda row: int(row["step"]) <= step) if self.metrics.exists() else 0
        for file in list(self.rollouts.glob("step_*")):
            file_step = step_of(file)
            if file_step is None or file_step > step:
                file.unlink()
        self.summary.unlink(missing_ok=True)
        return removed


class RunLock:
    """An exclusive lock on a run folder: flock on ``.lock``, which holds the owner's pid and host as JSON."""

    def __init__(self, root: Path, wait_s: float) -> None:
        self.path = root / ".lock"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        give_up_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_s:
                    owner = self._owner()
                    os.close(self._fd)
                    raise RunFolderBusy(
                        f"run folder {root} is in use by {owner}; two trainers must not write to one folder: "
                        "stop that one, or choose another folder with --set run.dir=..."
                    ) from None
                time.sleep(0.1)
        with naming_disk_full(self.path, "the run folder's lock"):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _owner(self) -> str:
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            pid, host = int(owner["pid"]), str(owner["host"])
        except (ValueError, KeyError, TypeError):  # it holds the lock and has not written its name yet
            return "another process, which has not said its name"
        gone = host == socket.gethostname() and not Path("/proc", str(pid)).exists() and Path("/proc/self").exists()
        return f"pid {pid} on host {host}" + (" (ended; a process that it started still runs)" if gone else "")

    def close(self) -> None:
        """Let the folder go; again does nothing. The file stays: deleting it would let two owners in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def put_in_place(aside: Path, folder: Path) -> None:
    """Rename a complete checkpoint to its name; one that has the name already is deleted.

    No file system swaps two folders at once, so the old one steps aside first: killed in between, ``clean`` puts it
    back. One of the two is always there.
    """
    replaced = folder.with_name(folder.name + _REPLACED_SUFFIX)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    aside.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


class CheckpointKeeper:
    """Which checkpoints of a run there are, and which stay: the newest ``keep_last``, the best by evaluation, and those
    of every ``keep_every_steps``-th step (0: none for that reason)."""

    def __init__(self, folder: Path, keep_last: int, keep_best: bool, keep_every_steps: int = 0) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every_steps = keep_every_steps
        self._intact: Path | None = None  # compared with its manifest in this start

    def folder_for(self, step: int) -> Path:
        """Where the checkpoint of ``step`` belongs. The policy's save writes aside and renames to it."""
        return self.folder / step_name(step)

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return [path for path in self._saved() if (path / MANIFEST).is_file()]

    def newest(self) -> Path | None:
        """The newest complete checkpoint, its files not compared; None when there is none."""
        return next(reversed(self.complete()), None)

    def newest_intact(self) -> Path | None:
        """The newest checkpoint whose files are those that were saved; None when nothing was ever saved.

        Newer ones are set aside under another name, and the log and the console told why. Every file is read, once per
        start. Only the process that holds the run's lock may call it.

        Raises:
            CheckpointDamaged: there are checkpoints, and none is intact. All are left as they are.
            CheckpointUnreadable: the newest that is not damaged cannot be read now, or is of another format.
        """
        damaged: list[tuple[Path, CheckpointDamaged]] = []
        for folder in reversed(self._saved()):
            try:
                if folder != self._intact:
                    check_manifest(folder)
            except CheckpointDamaged as error:
                damaged.append((folder, error))
                continue
            for broken, why in damaged:
                aside = self._set_aside(broken)
                logger.warning("%s. Set aside as %s; going on from %s", why, aside.name, folder.name)
            self._intact = folder
            return folder
        if damaged:
            listed = "; ".join(str(why) for _, why in damaged)
            raise CheckpointDamaged(
                f"none of the checkpoints in {self.folder} is intact, and training does not start from scratch over "
                f"them: {listed}. Put back what is missing, or remove the folder {self.folder} to start from scratch"
            )
        return None

    def best(self) -> Path | None:
        """The checkpoint that ``best`` points to; None when it points to nothing complete."""
        pointer = self.folder / "best"
        if not pointer.is_symlink():
            return None
        target = self.folder / os.readlink(pointer)
        return target if (target / MANIFEST).is_file() else None

    def saved(self, step: int, best: bool) -> None:
        """Take note that the checkpoint of ``step`` is complete; then drop those that need not stay.

        Raises FileNotFoundError when it has no manifest.
        """
        folder = self.folder_for(step)
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"checkpoint {folder} has no {MANIFEST}: its save did not complete")
        if best:
            self._point_best_at(folder)
        self._prune()

    def clean(self) -> None:
        """Put right what killed saves and killed deletions left: delete partial folders, put back a replaced one whose
        successor did not come to its name.

        Only the process that holds the run's lock may call it, and not while it saves.
        """
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            if path.name.endswith(_REPLACED_SUFFIX):
                successor = path.with_name(path.name.removesuffix(_REPLACED_SUFFIX))
                if successor.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(successor)
            elif path.name.endswith(PARTIAL_SUFFIX):
                logger.info("removing %s, which an interrupted run left", path)
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _saved(self) -> list[Path]:
        """All folders of a checkpoint's name, oldest first. A save gives it to whole ones only, so one that lacks
        something has been damaged since."""
        found = [path for path in self.folder.glob("step_*") if step_of(path) is not None]
        return sorted(found, key=lambda path: step_of(path) or 0)

    def _set_aside(self, folder: Path) -> Path:
        """Nothing of a damaged checkpoint is deleted: what is wrong with it may be mended."""
        number = 1
        aside = folder.with_name(folder.name + DAMAGED_SUFFIX)
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}{DAMAGED_SUFFIX}_{number}")
        return folder.rename(aside)

    def _point_best_at(self, folder: Path) -> None:
        aside = self.folder / f"best{PARTIAL_SUFFIX}"
        aside.unlink(missing_ok=True)
        with naming_disk_full(self.folder / "best", "the pointer to the best checkpoint"):
            aside.symlink_to(folder.name)
            os.replace(aside, self.folder / "best")

    def _prune(self) -> None:
        best = self.best() if self.keep_best else None
        every = self.keep_every_steps
        for path in self.complete()[: -self.keep_last]:
            if path == best or (every and (step_of(path) or 0) % every == 0):
                continue
            # Renamed first: a deletion that is killed half-way must not look like a checkpoint.
            doomed = path.with_name(path.name + PARTIAL_SUFFIX)
            os.replace(path, doomed)
            # Hundreds of gigabytes take a while to go; what a killed run leaves of them, ``clean`` removes.
            threading.Thread(target=shutil.rmtree, args=(doomed, True), name="checkpoint-deletion").start()
