"""The folder of a run's checkpoints in shared memory, which outlives the run's processes but not the node.

Its name is new for each run; the link ``in_memory`` among the checkpoints on disk leads to it. So a run folder that was
made anew, or copied, never finds the checkpoints of another run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from or1_megatron.checkpoint.keeper import CheckpointKeeper, put_in_place
from or1_megatron.checkpoint.manifest import CheckpointDamaged, check_manifest, sync
from or1_megatron.runtime.files import PARTIAL_SUFFIX
from or1_megatron.runtime.run_folder import step_of

log = logging.getLogger(__name__)

SHARED_MEMORY: Final = Path("/dev/shm")
_LINK: Final = "in_memory"


def memory_folder(checkpoints: Path) -> Path | None:
    """Return the folder in shared memory that belongs to the run with these checkpoints; None if it has none."""
    link = checkpoints / _LINK
    if not link.is_symlink() or not (folder := Path(os.readlink(link))).name.startswith(_prefix(checkpoints)):
        return None
    there = folder.parent == SHARED_MEMORY and folder.is_dir() and folder.stat().st_uid == os.getuid()
    return folder if there else None


def make_memory_folder(checkpoints: Path) -> Path:
    """Return the run's folder in shared memory; make it if the run has none."""
    if (folder := memory_folder(checkpoints)) is None:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(checkpoints), dir=SHARED_MEMORY))
        (checkpoints / _LINK).unlink(missing_ok=True)
        (checkpoints / _LINK).symlink_to(folder)
    return folder


def memory_keeper(checkpoints: Path) -> CheckpointKeeper | None:
    """Return the keeper of the run's checkpoints in memory, for ``CheckpointKeeper.memory``; None if it has none.

    The keeper drops a generation when the one after it is complete; so there are two while one is written.
    """
    folder = memory_folder(checkpoints)
    return None if folder is None else CheckpointKeeper(folder, keep_last=1, keep_best=False)


def newest_saved(checkpoints: Path) -> str:
    """Say which checkpoint of a run is the newest that is complete, on disk or in memory, and where."""
    newest = CheckpointKeeper(checkpoints, 1, False, memory=memory_keeper(checkpoints)).newest()
    return "nothing" if newest is None else f"the checkpoint of step {step_of(newest)} in {newest.parent}"


def remove_memory_folder(checkpoints: Path) -> None:
    """Delete the run's checkpoints in memory, if there are any."""
    if (folder := memory_folder(checkpoints)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
    (checkpoints / _LINK).unlink(missing_ok=True)


def bring_to_disk(keeper: CheckpointKeeper) -> None:
    """Copy the newest intact checkpoint in memory to the disk, if it is newer than those there; delete those in memory.

    Only the process that holds the run's lock may call this. If the disk does not take it, all stays in memory, with a
    warning.
    """
    try:
        if (newest := keeper.newest_in_memory()) is not None:
            aside = keeper.folder / (newest.name + PARTIAL_SUFFIX)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(newest, aside)
            for path in (*aside.iterdir(), aside):
                sync(path)
            check_manifest(aside)
            put_in_place(aside, keeper.folder / newest.name)
    except (OSError, CheckpointDamaged) as error:
        kept = "the newest checkpoint is in memory, in %s, and stays there: it could not be copied to the disk: %s"
        log.warning(kept, memory_folder(keeper.folder), error)
        return
    remove_memory_folder(keeper.folder)


def _prefix(checkpoints: Path) -> str:
    digest = hashlib.blake2b(str(checkpoints.resolve()).encode(), digest_size=8).hexdigest()
    return f"or1_checkpoints_{os.getuid()}_{digest}_"
