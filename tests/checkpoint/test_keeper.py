"""CheckpointKeeper on real folders: what stays, what is set aside, and what a killed save leaves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from or1_megatron.checkpoint import manifest
from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable, write_manifest


def make_checkpoint(keeper: CheckpointKeeper, step: int) -> Path:
    folder = keeper.folder_for(step)
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"w" * 10)
    write_manifest(folder)
    return folder


def names(folder: Path) -> list[str]:
    for thread in threading.enumerate():
        if thread.name == "checkpoint-deletion":
            thread.join()
    return sorted(path.name for path in folder.iterdir())


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, keep_last=2, keep_best=True)
    for step in (10, 20, 30, 40):
        make_checkpoint(keeper, step)
        keeper.saved(step, best=step == 10)
    assert names(tmp_path) == ["best", "step_000010", "step_000030", "step_000040"]
    assert keeper.best() == tmp_path / "step_000010"
    assert (tmp_path / "best" / "weights.bin").exists()  # the pointer can be followed

    make_checkpoint(keeper, 50)
    keeper.saved(50, best=True)  # a new best lets the old one go
    assert names(tmp_path) == ["best", "step_000040", "step_000050"]
    assert keeper.best() == keeper.newest() == tmp_path / "step_000050"


def test_without_keep_best_only_the_last_stay(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, keep_last=1, keep_best=False)
    for step in (1, 2):
        make_checkpoint(keeper, step)
        keeper.saved(step, best=step == 1)
    assert [path.name for path in keeper.complete()] == ["step_000002"]
    assert keeper.best() is None


def test_every_mth_step_stays(tmp_path: Path) -> None:
    """Every 20 steps for good, the last one, and the best, which is neither."""
    keeper = CheckpointKeeper(tmp_path, keep_last=1, keep_best=True, keep_every_steps=20)
    for step in (10, 20, 25, 30, 40, 50):
        make_checkpoint(keeper, step)
        keeper.saved(step, best=step == 25)
    assert names(tmp_path) == ["best", *(f"step_0000{step}" for step in (20, 25, 40, 50))]


def test_newest_is_complete_and_leftovers_go(tmp_path: Path) -> None:
    """Kills can leave a partial save, deletion or pointer."""
    keeper = CheckpointKeeper(tmp_path / "checkpoints", keep_last=2, keep_best=True)
    assert keeper.newest() is keeper.newest_intact() is None
    keeper.clean()  # no folder yet: nothing to do
    make_checkpoint(keeper, 9)
    make_checkpoint(keeper, 1_000_000)  # beyond six digits: by number, not by name
    (keeper.folder / "step_000012.partial").mkdir()
    (keeper.folder / "step_000012.partial" / "manifest.json").write_text("{}")
    (keeper.folder / "best.partial").symlink_to("step_000009")
    (keeper.folder / "notes.txt").write_text("mine")
    keeper.clean()
    assert names(keeper.folder) == ["notes.txt", "step_000009", "step_1000000"]
    assert keeper.newest() == keeper.newest_intact() == keeper.folder / "step_1000000"


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run resumes from the newest intact one. The log says what is wrong with newer ones, which are kept."""
    keeper = CheckpointKeeper(tmp_path, keep_last=2, keep_best=True)
    for step in (1, 2, 3, 4):
        make_checkpoint(keeper, step)
    (tmp_path / "step_000003" / "weights.bin").write_bytes(b"w" * 9 + b"x")
    (tmp_path / "step_000004" / "manifest.json").unlink()
    (tmp_path / "step_000004.damaged").mkdir()  # from another time
    assert keeper.newest_intact() == tmp_path / "step_000002"
    assert names(tmp_path) == ["step_000001", "step_000002"] + [
        f"step_00000{rest}" for rest in ("3.damaged", "4.damaged", "4.damaged_2")
    ]
    assert names(tmp_path / "step_000003.damaged") == ["manifest.json", "weights.bin"]
    missing, corrupt = (record.getMessage() for record in caplog.records)
    assert "step_000004/manifest.json is missing" in missing and "aside as step_000004.damaged_2; resuming" in missing
    assert "step_000003/weights.bin is corrupt" in corrupt and corrupt.endswith("resuming from step_000002")
    keeper.clean()
    assert (tmp_path / "step_000003.damaged").is_dir()


def test_a_checkpoint_that_cannot_be_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be intact: the run does not resume from an older one."""
    keeper = CheckpointKeeper(tmp_path, keep_last=2, keep_best=True)
    for step in (1, 2):
        make_checkpoint(keeper, step)
    monkeypatch.setattr(manifest, "entry_of", lambda path: (path / "no folder").stat())
    with pytest.raises(CheckpointUnreadable, match=r"step_000002/weights\.bin cannot be read \(\[Errno"):
        keeper.newest_intact()
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_files_are_compared_once_per_start(tmp_path: Path) -> None:
    """The next process finds what was altered afterwards."""
    keeper = CheckpointKeeper(tmp_path, keep_last=2, keep_best=True)
    folder = make_checkpoint(keeper, 1)
    assert keeper.newest_intact() == folder
    (folder / "weights.bin").write_bytes(b"v" * 10)
    assert keeper.newest_intact() == folder
    with pytest.raises(CheckpointDamaged, match=r"weights\.bin is corrupt"):
        CheckpointKeeper(tmp_path, keep_last=2, keep_best=True).newest_intact()


def test_without_an_intact_checkpoint_nothing_starts_from_scratch(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, keep_last=2, keep_best=True)
    for step in (1, 2):
        (make_checkpoint(keeper, step) / "weights.bin").unlink()
    with pytest.raises(CheckpointDamaged) as refused:
        keeper.newest_intact()
    for said in ("does not start from scratch", "step_000001/weights.bin is missing", "step_000002/weights.bin is"):
        assert said in str(refused.value)
    assert names(tmp_path) == ["step_000001", "step_000002"]
