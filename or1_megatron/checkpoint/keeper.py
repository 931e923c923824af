"""Finds a run's newest intact checkpoint, deletes old checkpoints, and cleans up after killed saves."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from itertools import chain, count
from pathlib import Path
from typing import Final

from or1_megatron.checkpoint.manifest import MANIFEST, CheckpointDamaged, check_manifest, sync
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full
from or1_megatron.runtime.run_folder import step_name, step_of

logger = logging.getLogger(__name__)

DAMAGED_SUFFIX: Final = ".damaged"
"""The end of the name of a damaged checkpoint, whose files are not as they were saved."""


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, which may be repairable, and return the new path."""
    names = chain([""], (f"_{number}" for number in count(2)))
    paths = (folder.with_name(f"{folder.name}{DAMAGED_SUFFIX}{name}") for name in names)
    return folder.rename(next(path for path in paths if not path.exists()))


def put_in_place(aside: Path, folder: Path) -> None:
    """Rename the complete checkpoint ``aside`` to ``folder``.

    If ``folder`` exists, it is damaged, since the run did not resume from it. It is renamed first (``set_aside``).
    """
    if folder.exists():
        set_aside(folder)
    aside.rename(folder)
    sync(folder.parent)


class CheckpointKeeper:
    """Finds and deletes the checkpoints of a run. These stay: the newest ``keep_last``; the best by evaluation (with
    ``keep_best``); and, unless ``keep_every_steps`` is 0, the checkpoint of every ``keep_every_steps``-th step."""

    def __init__(self, folder: Path, keep_last: int, keep_best: bool, keep_every_steps: int = 0) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every_steps = keep_every_steps
        self._intact: Path | None = None  # compared with its manifest by this process

    def folder_for(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``. The saver gives this name only to a complete checkpoint."""
        return self.folder / step_name(step)

    def complete(self) -> list[Path]:
        """Return all complete checkpoints, oldest first."""
        return [path for path in self._saved() if (path / MANIFEST).is_file()]

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, without a check of its files; None if there is none."""
        return next(reversed(self.complete()), None)

    def newest_intact(self) -> Path | None:
        """Return the newest checkpoint whose files are as they were saved; None if nothing was ever saved.

        Newer, damaged checkpoints are renamed, with a warning in the log and on the console. A process checks the files
        of a checkpoint only once. Only the process that holds the run's lock may call this.

        Raises:
            CheckpointDamaged: there are checkpoints, and all are damaged. No checkpoint is renamed then.
            CheckpointUnreadable: the newest undamaged checkpoint cannot be read now, or has another format.
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
                aside = set_aside(broken)
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

    def best(self) -> Path | None:
        """Return the complete checkpoint to which the link ``best`` points; None if either does not exist."""
        pointer = self.folder / "best"
        if not pointer.is_symlink():
            return None
        target = self.folder / os.readlink(pointer)
        return target if (target / MANIFEST).is_file() else None

    def saved(self, step: int, best: bool) -> None:
        """Record that the checkpoint of ``step`` is complete, and delete the checkpoints that need not stay."""
        if best:
            self._point_best_at(self.folder_for(step))
        self._prune()

    def clean(self) -> None:
        """Delete the remains of killed saves and deletions.

        Only the process that holds the run's lock may call this, and not while it saves.
        """
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else []:
            if path.name.endswith(PARTIAL_SUFFIX):
                logger.info("removing %s, left by an interrupted run", path)
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _saved(self) -> list[Path]:
        """Return all folders with a checkpoint's name, oldest first. Only complete checkpoints get such names, so a
        folder that lacks a file is damaged."""
        saved = [path for path in self.folder.glob("step_*") if step_of(path) is not None]
        return sorted(saved, key=lambda path: step_of(path) or 0)

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
