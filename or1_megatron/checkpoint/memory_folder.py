"""The folder of a run's checkpoints in shared memory, which outlives the run's processes but not the node.

With trainer ranks on several nodes, each node has a folder with a part of each checkpoint (``saver``). Those of nodes
other than 0 have the node's number behind the name. Ranks do not load parts: the launchers bring them to the disk.

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

from or1_megatron.checkpoint.keeper import CheckpointKeeper, put_in_place
from or1_megatron.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable, check_manifest, sync
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


def bring_to_disk(keeper: CheckpointKeeper, others: Callable[[str], None] | None = None) -> bool:
    """Bring the newest checkpoint in memory to the disk, if it is newer than those there; delete those in memory.

    Only the process that holds the run's lock may call this. If the disk does not take it, all stays in memory, with a
    warning, and the result is False.

    Args:
        others: where each node has a part: has the other nodes call ``bring_part`` for a checkpoint's name, and returns
            when they have. Then only the newest checkpoint is tried: what one lacks, the one before it lacks, too.
    """
    on_disk = max((step_of(path) or 0 for path in keeper.complete()), default=-1)
    saved = [] if keeper.memory is None else keeper.memory.complete()
    newer = [path.name for path in reversed(saved) if (step_of(path) or 0) > on_disk]
    try:
        for name in newer if others is None else newer[:1]:
            if _put_together(keeper.folder, name, others):
                break
    except (OSError, CheckpointUnreadable) as error:
        kept = "the newest checkpoint is in memory, in %s, and stays there: it could not be copied to the disk: %s"
        log.warning(kept, memory_folder(keeper.folder), error)
        return False
    remove_memory_folder(keeper.folder)
    return True


def _put_together(checkpoints: Path, name: str, others: Callable[[str], None] | None) -> bool:
    """Make a checkpoint on disk of its files in memory, of all nodes; return whether it is whole. Raises OSError."""
    aside = checkpoints / (name + PARTIAL_SUFFIX)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    bring_part(checkpoints, name)
    if others is not None:
        others(name)
    try:
        check_manifest(aside)
    except CheckpointDamaged as why:
        log.warning("%s. It was in memory, and is lost", why)
        shutil.rmtree(aside, ignore_errors=True)
        return False
    sync(aside)
    put_in_place(aside, checkpoints / name)
    return True


def part_folder(folder: Path, node: int) -> Path:
    """Return where ``node`` has its part of the checkpoint that is ``folder`` on node 0."""
    return folder.parent.with_name(folder.parent.name + _node_suffix(node)) / folder.name


def bring_part(checkpoints: Path, name: str, node: int = 0) -> None:
    """Copy a node's files of a checkpoint in memory to where node 0 puts it together, unless they are there.

    Raises OSError.
    """
    aside = checkpoints / (name + PARTIAL_SUFFIX)
    for part in _parts(checkpoints, node):
        for file in [*part.glob(f"{name}/*"), *part.glob(f"{name}{PARTIAL_SUFFIX}/*")]:
            if aside.is_dir() and not (aside / file.name).exists():
                copy = aside / f"{file.name}.{node}"
                shutil.copyfile(file, copy)
                sync(copy)
                copy.rename(aside / file.name)


def drop_older_parts(next_one: Path) -> None:
    """Delete all but the newest of a node's checkpoints in memory, before the next one is written."""
    others = [path for path in next_one.parent.glob("step_*") if not path.name.startswith(next_one.name)]
    for path in sorted(others)[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def remove_parts(checkpoints: Path, node: int) -> None:
    """Delete a node's parts of the run's checkpoints in memory."""
    for part in _parts(checkpoints, node):
        shutil.rmtree(part, ignore_errors=True)


def _parts(checkpoints: Path, node: int) -> list[Path]:
    if node == 0:
        return [folder] if (folder := memory_folder(checkpoints)) is not None else []
    found = SHARED_MEMORY.glob(f"{_prefix(checkpoints)}*{_node_suffix(node)}")
    return [path for path in found if path.stat().st_uid == os.getuid()]


def _node_suffix(node: int) -> str:
    return f".{node}" if node else ""


def _prefix(checkpoints: Path) -> str:
    digest = hashlib.blake2b(str(checkpoints.resolve()).encode(), digest_size=8).hexdigest()
    return f"or1_checkpoints_{os.getuid()}_{digest}_"
