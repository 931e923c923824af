"""RunFolder, its lock and CheckpointKeeper on real folders and processes.

Not proven here: the lock across hosts, which depends on the network file system.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from or1_megatron.runtime.jsonl import read_rows
from or1_megatron.runtime.manifest import CheckpointDamaged, write_manifest
from or1_megatron.runtime.run_folder import CheckpointKeeper, RunFolder, RunFolderBusy, put_in_place, step_of


def make_checkpoint(keeper: CheckpointKeeper, step: int, manifest: bool = True) -> Path:
    folder = keeper.folder_for(step)
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"w" * 10)
    if manifest:
        write_manifest(folder)
    return folder


def names(folder: Path) -> list[str]:
    for thread in threading.enumerate():
        if thread.name == "checkpoint-deletion":
            thread.join()
    return sorted(path.name for path in folder.iterdir())


def test_layout_is_as_documented(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "first")
    run.create()
    run.create()  # again does nothing
    run.write_config("run: {}\n")
    run.write_summary({"steps": 3})
    assert names(run.root) == ["checkpoints", "config.yaml", "logs", "rollouts", "summary.json", "tensorboard"]
    assert run.read_summary() == {"steps": 3}
    assert (run.metrics.name, run.hf.name) == ("metrics.jsonl", "hf")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(NotADirectoryError, match="run is a file, a folder was expected"):
        RunFolder(tmp_path / "run").create()


def test_a_summary_that_is_no_json_leaves_the_old_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_summary({"wall_s": 1.0})
    with pytest.raises(ValueError, match="JSON"):
        run.write_summary({"wall_s": float("nan")})
    assert run.read_summary() == {"wall_s": 1.0}


HOLD = """
import sys, time
from pathlib import Path
from or1_megatron.runtime.run_folder import RunFolder
lock = RunFolder(Path(sys.argv[1])).lock()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_second_trainer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """Another process holds the folder; its pid and host are in the message; kill -9 of it frees the folder."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "locked\n"
        with pytest.raises(RunFolderBusy, match=rf"in use by pid {owner.pid} on host {os.uname().nodename}; two"):
            RunFolder(tmp_path).lock(wait_s=0.0)
    finally:
        owner.kill()
        owner.wait()
    with RunFolder(tmp_path).lock(wait_s=5.0):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunFolderBusy):  # a lock of the same process counts too
            RunFolder(tmp_path).lock(wait_s=0.0)
    RunFolder(tmp_path).lock(wait_s=0.0).close()


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
    """Kills can leave a partial save, deletion or pointer, and a replacement at any point."""
    keeper = CheckpointKeeper(tmp_path / "checkpoints", keep_last=2, keep_best=True)
    assert keeper.newest() is keeper.newest_intact() is None
    keeper.clean()  # no folder yet: nothing to do
    make_checkpoint(keeper, 9)
    make_checkpoint(keeper, 1_000_000)  # beyond six digits: by number, not by name
    (keeper.folder / "step_000012.partial").mkdir()
    (keeper.folder / "step_000012.partial" / "manifest.json").write_text("{}")
    (keeper.folder / "best.partial").symlink_to("step_000009")
    (keeper.folder / "notes.txt").write_text("mine")
    make_checkpoint(keeper, 10).rename(keeper.folder / "step_000010.replaced")  # its successor did not come
    make_checkpoint(keeper, 11).rename(keeper.folder / "step_000011.replaced")  # its successor came
    make_checkpoint(keeper, 11)
    keeper.clean()
    assert names(keeper.folder) == ["notes.txt", "step_000009", "step_000010", "step_000011", "step_1000000"]
    assert keeper.newest() == keeper.newest_intact() == keeper.folder / "step_1000000"


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    """A checkpoint written under another name takes its place, also if a kill left part of an earlier replacement."""
    keeper = CheckpointKeeper(tmp_path, keep_last=1, keep_best=False)
    make_checkpoint(keeper, 5)
    (tmp_path / "step_000005.replaced").mkdir()
    make_checkpoint(keeper, 6)
    (tmp_path / "step_000006" / "new.bin").write_text("new")
    put_in_place((tmp_path / "step_000006").rename(tmp_path / "step_000005.partial"), tmp_path / "step_000005")
    assert names(tmp_path) == ["step_000005"]
    assert names(tmp_path / "step_000005") == ["manifest.json", "new.bin", "weights.bin"]


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


def test_saved_refuses_a_checkpoint_without_manifest(tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path, keep_last=1, keep_best=True)
    make_checkpoint(keeper, 4)
    make_checkpoint(keeper, 5, manifest=False)
    with pytest.raises(FileNotFoundError, match=r"step_000005 has no manifest\.json"):
        keeper.saved(5, best=True)
    assert keeper.newest() == tmp_path / "step_000004"


def test_truncate_after_leaves_each_step_once(tmp_path: Path) -> None:
    """A run killed at step 7 resumes at 5: the records of 6 and 7 are deleted, with the torn line of 8."""
    run = RunFolder(tmp_path)
    run.create()
    rows = [{"step": 0, "eval/accuracy": 0.25}, *({"step": s, "reward/mean": s / 10} for s in range(1, 8))]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 8, "rew')
    for step in (4, 5, 6, 7):
        (run.rollouts / f"step_{step:06d}.parquet").write_bytes(b"")
    (run.rollouts / "step_000008.parquet.partial").write_bytes(b"")
    run.write_summary({"steps": 7})

    run.truncate_after(5)
    assert list(read_rows(run.metrics)) == rows[:6]
    assert names(run.rollouts) == ["step_000004.parquet", "step_000005.parquet"]
    assert not run.summary.exists()
    run.truncate_after(5)
    assert list(read_rows(run.metrics)) == rows[:6]
    run.truncate_after(-1)
    assert run.metrics.read_text() == ""


def test_truncate_after_in_an_empty_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.create()
    run.truncate_after(0)
    assert not run.metrics.exists()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_000012", 12),
        ("step_000012.parquet", 12),
        ("step_1234567.parquet", 1234567),
        ("step_000012.partial", None),
        ("step_000012.parquet.partial", None),
        ("best", None),
        ("step_x", None),
    ],
)
def test_step_of(name: str, step: int | None) -> None:
    assert step_of(Path("a") / name) == step
