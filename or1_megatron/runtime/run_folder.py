"""The folder of a run: its files, the lock on it, and which checkpoints stay.

    config.yaml        the resolved configuration
    metrics.jsonl      one JSON object per step (docs/schemas.md)
    faults.jsonl       what died or stalled and was mended (runtime.faults)
    rollouts/          step_000012.parquet
    checkpoints/       step_000010/ with manifest.json, written last; best -> step_000010; in_memory (memory_folder);
                       damaged ones are renamed to step_000008.damaged
    dumps/             step_000012_update_0/, for or1 replay: batches whose loss or gradient was not finite
    hf/                the exported model
    summary.json       the outcome of the run
    tensorboard/       event files
    logs/              rank_0.log ...

Names of files and folders that are still being written end in ``.partial``. The next process deletes what a killed one
left.
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
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, Self

from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full, write_atomically
from or1_megatron.runtime.jsonl import keep_rows
from or1_megatron.runtime.manifest import MANIFEST, CheckpointDamaged, CheckpointUnreadable, check_manifest, sync
from or1_verify.errors import UserError

logger = logging.getLogger(__name__)

DAMAGED_SUFFIX: Final = ".damaged"
"""The end of the name of a checkpoint that was set aside because its files are not as they were saved."""

LOOP_STATE: Final = "loop.json"
"""The file of a checkpoint that holds the loop's state: everything that is not a tensor."""

FINISHED_RESPONSES: Final = "finished_responses.pickle"
"""The file of a checkpoint with responses that were sampled and not trained yet."""

_REPLACED_SUFFIX: Final = ".replaced"
_STEP = re.compile(r"step_(\d+)")

USER_OS_ERRORS: Final = (NotADirectoryError, PermissionError, FileExistsError)
"""Errors of creating a folder at a path that the user gave. Their messages name the path."""


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
        self.rollouts = root / "rollouts"
        self.checkpoints = root / "checkpoints"
        self.dumps = root / "dumps"
        self.hf = root / "hf"
        self.summary = root / "summary.json"
        self.tensorboard = root / "tensorboard"
        self.logs = root / "logs"

    @property
    def run_id(self) -> str:
        """The run's name, which no other run has: of its actors in Ray, and of its heartbeats."""
        return str(self.root.resolve()).strip("/").replace("/", "-")

    def create(self) -> None:
        """Create the folder and the subfolders that are missing, except ``hf``, which the export creates.

        Raises NotADirectoryError if a file is in the way.
        """
        for folder in (self.root, self.rollouts, self.checkpoints, self.tensorboard, self.logs):
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(f"run folder: {folder} is a file, a folder was expected")
            with naming_disk_full(folder, "the run folder"):
                folder.mkdir(parents=True, exist_ok=True)

    def lock(self, wait_s: float = 10.0) -> RunLock:
        """Lock the folder for this process until the lock is closed or the process ends in any way.

        Waits up to ``wait_s``, since the last process of a killed run may still be ending. Raises RunFolderBusy naming
        the owner.
        """
        return RunLock(self.root, wait_s)

    def write_config(self, resolved_yaml: str) -> None:
        write_atomically(self.config, resolved_yaml.encode(), "the resolved configuration")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the fields of ``schemas.SUMMARY``. Raises ValueError for numbers that JSON cannot express."""
        text = json.dumps(dict(summary), indent=2, allow_nan=False) + "\n"
        write_atomically(self.summary, text.encode(), "the run's summary")

    def read_summary(self) -> dict[str, Any]:
        """Return the summary. Raises FileNotFoundError if the run has none yet."""
        return json.loads(self.summary.read_text())

    def truncate_after(self, step: int) -> None:
        """Delete what was recorded after ``step``, so that a run that resumes there has each step once; -1: everything.

        This deletes the summary too, since the run has not ended. TensorBoard's tracker discards later steps by itself
        (``first_step``).
        """
        if self.metrics.exists():
            keep_rows(self.metrics, lambda row: int(row["step"]) <= step)
        for file in list(self.rollouts.glob("step_*")):
            file_step = step_of(file)
            if file_step is None or file_step > step:
                file.unlink()
        self.summary.unlink(missing_ok=True)


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    steps = ((step_of(path), path) for path in folder.glob("step_*"))
    return sorted(step for step, path in steps if step is not None and (path / MANIFEST).is_file())


def find_run(root: Path) -> RunFolder:
    """Return the run folder at ``root``. Raises FileNotFoundError if there is none."""
    folder = RunFolder(root)
    if not root.is_dir():
        raise FileNotFoundError(f"no run folder {root}")
    if not any(path.exists() for path in (folder.config, folder.metrics, folder.rollouts)):
        raise FileNotFoundError(
            f"{root} is not a run folder: it has neither config.yaml nor metrics.jsonl nor rollouts/"
        )
    return folder


class RunLock:
    """An exclusive lock on a run folder: flock on the file ``.lock``, which holds the owner's pid and host as JSON."""

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
                        f"run folder {root} is in use by {owner}; two trainers must not write to one folder. "
                        "Stop the other one, or choose another folder with --set run.dir=..."
                    ) from None
                time.sleep(0.1)
        with naming_disk_full(self.path, "the run folder's lock"):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _owner(self) -> str:
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            pid, host = int(owner["pid"]), str(owner["host"])
        except (ValueError, KeyError, TypeError):  # it has taken the lock and not written its name yet
            return "another process, whose pid is not known yet"
        gone = host == socket.gethostname() and not Path("/proc", str(pid)).exists() and Path("/proc/self").exists()
        return f"pid {pid} on host {host}" + (" (ended; a process that it started still runs)" if gone else "")

    def close(self) -> None:
        """Release the lock. A second call does nothing. The file stays: deleting it would allow two owners."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def put_in_place(aside: Path, folder: Path) -> None:
    """Rename the complete checkpoint ``aside`` to ``folder``, and delete a checkpoint that had this name.

    No file system swaps two folders atomically, so the old one is renamed first; after a kill in between, ``clean``
    renames it back. One of the two always exists.
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
    """Finds the checkpoints of a run. Deletes all but the newest ``keep_last``, the best by evaluation (if
    ``keep_best``), and those of every ``keep_every_steps``-th step (0: no such rule)."""

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_best: bool,
        keep_every_steps: int = 0,
        memory: CheckpointKeeper | None = None,
    ) -> None:
        """``memory``: the run's checkpoints in shared memory. They count as the run's where they are the newest."""
        self.folder = folder
        self.memory = memory
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every_steps = keep_every_steps
        self._intact: Path | None = None  # compared with its manifest by this process

    def folder_for(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``. The policy writes elsewhere first and renames."""
        return self.folder / step_name(step)

    def complete(self) -> list[Path]:
        """Return all complete checkpoints, oldest first."""
        return [path for path in self._saved() if (path / MANIFEST).is_file()]

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint without comparing its files; None if there is none."""
        found = self.complete()[-1:] + (self.memory.complete()[-1:] if self.memory is not None else [])
        return max(found, key=lambda path: step_of(path) or 0, default=None)

    def newest_intact(self) -> Path | None:
        """Return the newest checkpoint whose files are as they were saved; None if nothing was ever saved.

        Damaged newer ones are renamed, with a warning in the log and on the console. Every file is read, once per
        process. Only the process that holds the run's lock may call this.

        Raises:
            CheckpointDamaged: there are checkpoints, but none is intact. All are left as they are.
            CheckpointUnreadable: the newest one that is not damaged cannot be read now, or has another format.
        """
        if (found := self._intact_in_memory()) is not None:
            return found
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
                logger.warning("%s. Set aside as %s; resuming from %s", why, aside.name, folder.name)
            self._intact = folder
            return folder
        if damaged:
            listed = "; ".join(str(why) for _, why in damaged)
            raise CheckpointDamaged(
                f"none of the checkpoints in {self.folder} is intact, and training does not start from scratch while "
                f"they are there: {listed}. Put back what is missing, or remove the folder to start from scratch"
            )
        return None

    def _intact_in_memory(self) -> Path | None:
        """Return the newest intact checkpoint in memory if it is newer than all on disk; delete the others there."""
        on_disk = max((step_of(path) or 0 for path in self.complete()), default=-1)
        newest: Path | None = None
        for folder in reversed(self.memory._saved() if self.memory is not None else []):
            if newest is None and (step_of(folder) or 0) > on_disk:
                try:
                    if folder != self._intact:
                        check_manifest(folder)
                    newest = self._intact = folder
                    continue
                except (CheckpointDamaged, CheckpointUnreadable) as why:
                    logger.warning("%s. It was in memory, and is deleted", why)
            shutil.rmtree(folder)
        return newest

    def best(self) -> Path | None:
        """Return the checkpoint that ``best`` points to; None if it is not complete."""
        pointer = self.folder / "best"
        if not pointer.is_symlink():
            return None
        target = self.folder / os.readlink(pointer)
        return target if (target / MANIFEST).is_file() else None

    def saved(self, step: int, best: bool) -> None:
        """Record that the checkpoint of ``step`` is complete, and delete those that need not stay.

        Raises FileNotFoundError if it has no manifest.
        """
        folder = self.folder_for(step)
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(f"checkpoint {folder} has no {MANIFEST}: its save did not complete")
        if best:
            self._point_best_at(folder)
        self._prune()

    def clean(self) -> None:
        """Clean up after killed saves and deletions: delete partial folders, and rename a replaced folder back if its
        successor never got the name.

        Only the process that holds the run's lock may call this, and not while it saves.
        """
        if self.memory is not None:
            self.memory.clean()
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            if path.name.endswith(_REPLACED_SUFFIX):
                successor = path.with_name(path.name.removesuffix(_REPLACED_SUFFIX))
                if successor.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(successor)
            elif path.name.endswith(PARTIAL_SUFFIX):
                logger.info("removing %s, left by an interrupted run", path)
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _saved(self) -> list[Path]:
        """Return all folders with a checkpoint's name, oldest first. Only complete checkpoints get one; if a file is
        missing, the checkpoint has been damaged since."""
        found = [path for path in self.folder.glob("step_*") if step_of(path) is not None]
        return sorted(found, key=lambda path: step_of(path) or 0)

    def _set_aside(self, folder: Path) -> Path:
        """Rename a damaged checkpoint; it is not deleted, since it may be repairable. Return the new path."""
        names = chain([""], (f"_{number}" for number in count(2)))
        paths = (folder.with_name(f"{folder.name}{DAMAGED_SUFFIX}{name}") for name in names)
        return folder.rename(next(path for path in paths if not path.exists()))

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
            # Renamed first, so that a deletion that is killed half-way does not look like a checkpoint.
            doomed = path.with_name(path.name + PARTIAL_SUFFIX)
            os.replace(path, doomed)
            # In a thread, since hundreds of gigabytes take a while. ``clean`` removes what a killed run leaves.
            threading.Thread(target=shutil.rmtree, args=(doomed, True), name="checkpoint-deletion").start()
