"""The folder of a run's checkpoints in shared memory, which outlives the run's processes but not the node.

With trainer ranks on several nodes, each node has a folder of this name, with a part of each checkpoint (``saver``).
Ranks do not load that: the launchers bring their parts to the disk first.

Its name is new for each run; the link ``in_memory`` among the checkpoints on disk leads to it. So a run folder that was
made anew, or copied, never finds the checkpoints of another run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from or1_megatron.runtime.files import PARTIAL_SUFFIX
from or1_megatron.runtime.manifest import check_manifest, sync
from or1_megatron.runtime.run_folder import CheckpointKeeper, put_in_place, step_of

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


def remove_memory_folder(checkpoints: Path) -> None:
    """Delete the run's checkpoints in memory, if there are any."""
    if (folder := memory_folder(checkpoints)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
    (checkpoints / _LINK).unlink(missing_ok=True)


def bring_to_disk(keeper: CheckpointKeeper) -> None:
    """Copy the newest checkpoint in memory to the disk, if it is newer than those there, and delete those in memory.

    Only the process that holds the run's lock may call this. What cannot be copied stays in memory, with a warning.
    """
    try:
        newest = keeper.newest_intact() if keeper.memory is not None else None
        if newest is not None and newest.parent != keeper.folder:
            aside = keeper.folder / (newest.name + PARTIAL_SUFFIX)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(newest, aside)
            for path in (*aside.iterdir(), aside):
                sync(path)
            put_in_place(aside, keeper.folder / newest.name)
    except Exception as error:
        kept = "the newest checkpoint is in memory, in %s, and stays there: it could not be copied to the disk: %s"
        log.warning(kept, memory_folder(keeper.folder), error)
    else:
        remove_memory_folder(keeper.folder)


def bring_parts_to_disk(keeper: CheckpointKeeper, others: Callable[[str], None]) -> None:
    """As ``bring_to_disk``, for checkpoints of which each node has a part; on node 0.

    Args:
        others: has all other nodes call ``bring_part`` with a checkpoint's name, and returns when they have.
    """
    folder = memory_folder(keeper.folder)
    newest, on_disk = keeper.newest(), max((step_of(path) or 0 for path in keeper.complete()), default=-1)
    if folder is None or newest is None or newest.parent != folder or (step_of(newest) or 0) <= on_disk:
        remove_memory_folder(keeper.folder)
        return
    aside = keeper.folder / (newest.name + PARTIAL_SUFFIX)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        bring_part(keeper.folder, newest.name)
        others(newest.name)
        check_manifest(aside)
        put_in_place(aside, keeper.folder / newest.name)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        log.warning("the newest checkpoint in memory, %s, is lost: %s", newest.name, error)
    remove_memory_folder(keeper.folder)


def bring_part(checkpoints: Path, name: str) -> None:
    """Copy this node's files of a checkpoint in memory to where node 0 puts it together, unless they are there.

    What cannot be copied is missing there, with a warning here.
    """
    aside = checkpoints / (name + PARTIAL_SUFFIX)
    try:
        for part in _parts(checkpoints):
            for file in [*part.glob(f"{name}/*"), *part.glob(f"{name}{PARTIAL_SUFFIX}/*")]:
                if aside.is_dir() and not (aside / file.name).exists():
                    copy = aside / f".{file.name}.{os.uname().nodename}"
                    shutil.copyfile(file, copy)
                    sync(copy)
                    copy.rename(aside / file.name)
    except OSError as error:
        log.warning("a part of checkpoint %s could not be copied to the disk: %s", name, error)


def drop_older_parts(next_one: Path) -> None:
    """Delete all but the newest of this node's checkpoints in memory, before the next one is written."""
    others = [path for path in next_one.parent.glob("step_*") if not path.name.startswith(next_one.name)]
    for path in sorted(others)[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def remove_parts(checkpoints: Path) -> None:
    """Delete this node's parts of the run's checkpoints in memory."""
    for part in _parts(checkpoints):
        shutil.rmtree(part, ignore_errors=True)


def _parts(checkpoints: Path) -> list[Path]:
    found = SHARED_MEMORY.glob(_prefix(checkpoints) + "*")
    return [path for path in found if path.stat().st_uid == os.getuid()]


def _prefix(checkpoints: Path) -> str:
    digest = hashlib.blake2b(str(checkpoints.resolve()).encode(), digest_size=8).hexdigest()
    return f"or1_checkpoints_{os.getuid()}_{digest}_"
