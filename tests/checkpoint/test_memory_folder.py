"""Checkpoints in shared memory: which one a run resumes from, whose they are, and that none stays."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from or1_megatron.checkpoint import memory_folder
from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.manifest import check_manifest, write_manifest
from or1_megatron.checkpoint.memory_folder import (
    bring_to_disk,
    make_memory_folder,
    memory_keeper,
    remove_memory_folder,
)


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of /dev/shm; nothing may be left in it."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", folder)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[CheckpointKeeper]:
    """The keeper of a run with checkpoints in memory."""
    disk = tmp_path / "run" / "checkpoints"
    disk.mkdir(parents=True)
    make_memory_folder(disk)
    yield CheckpointKeeper(disk, keep_last=2, keep_best=True, memory=memory_keeper(disk))
    remove_memory_folder(disk)


def make(keeper: CheckpointKeeper | None, step: int) -> Path:
    assert keeper is not None
    folder = keeper.folder_for(step)
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"w" * step)
    write_manifest(folder)
    return folder


def test_the_newest_of_both_counts(keeper: CheckpointKeeper) -> None:
    """The one on disk counts where both have a step. What is torn, damaged or older is deleted from memory, to make
    room for the next generation."""
    on_disk, older, newer = make(keeper, 10), make(keeper.memory, 11), make(keeper.memory, 12)
    torn, damaged = newer.with_name("step_000013.partial"), make(keeper.memory, 14)
    torn.mkdir()
    (damaged / "weights.bin").write_bytes(b"w" * 13 + b"x")
    assert keeper.newest() == damaged  # not compared
    keeper.clean()
    assert keeper.newest_intact() == keeper.newest() == newer
    assert not any(folder.exists() for folder in (older, torn, damaged))
    (newer / "manifest.json").unlink()
    assert make(keeper.memory, 11) == next_start(keeper).newest_intact()
    (older / "weights.bin").write_bytes(b"")
    assert next_start(keeper).newest_intact() == on_disk
    same = make(keeper.memory, 10)
    assert keeper.newest() == next_start(keeper).newest_intact() == on_disk
    assert not same.exists()


def next_start(keeper: CheckpointKeeper) -> CheckpointKeeper:
    """The keeper of the run's next process, which has compared nothing yet."""
    return CheckpointKeeper(keeper.folder, keep_last=2, keep_best=True, memory=memory_keeper(keeper.folder))


def test_one_generation_stays_when_the_next_is_complete(keeper: CheckpointKeeper) -> None:
    assert keeper.memory is not None
    for step in (1, 2, 3):
        make(keeper.memory, step)
        keeper.memory.saved(step, best=False)
    assert [path.name for path in keeper.memory.complete()] == ["step_000003"]


def test_a_run_finds_only_its_own(keeper: CheckpointKeeper, tmp_path: Path, shared_memory: Path) -> None:
    """A copy of the run folder, and a run folder that was made anew at the same place, lead to nothing."""
    make(keeper.memory, 3)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy, symlinks=True)
    assert memory_keeper(copy / "checkpoints") is None
    lost = keeper.folder
    shutil.rmtree(lost)
    lost.mkdir()
    assert memory_keeper(lost) is None
    assert make_memory_folder(lost) not in [keeper.memory and keeper.memory.folder]
    assert keeper.memory is not None
    shutil.rmtree(keeper.memory.folder)  # of the run that was deleted
    (shared_memory / "elsewhere").mkdir()
    (copy / "checkpoints" / "in_memory").unlink()
    (copy / "checkpoints" / "in_memory").symlink_to(shared_memory / "elsewhere")
    assert memory_keeper(copy / "checkpoints") is None
    (shared_memory / "elsewhere").rmdir()


@pytest.mark.parametrize("on_disk", [4, 6])
def test_a_run_that_ends_keeps_the_newest_on_disk(keeper: CheckpointKeeper, on_disk: int) -> None:
    make(keeper, on_disk)
    make(keeper.memory, 5)
    bring_to_disk(keeper)
    assert memory_keeper(keeper.folder) is None
    assert [path.name for path in keeper.complete()] == [
        f"step_00000{step}" for step in sorted({on_disk, max(on_disk, 5)})
    ]
    for folder in keeper.complete():
        check_manifest(folder)


def test_what_cannot_be_brought_to_disk_stays_in_memory(
    keeper: CheckpointKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    make(keeper.memory, 5)
    (keeper.folder / "step_000005.partial").write_text("in the way")
    bring_to_disk(keeper)
    assert "could not be copied to the disk" in caplog.text and keeper.complete() == []
    memory = memory_keeper(keeper.folder)
    assert memory is not None and [path.name for path in memory.complete()] == ["step_000005"]
