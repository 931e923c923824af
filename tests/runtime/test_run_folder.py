"""RunFolder and its lock on real folders and processes.

Not proven here: the lock across hosts, which depends on the network file system.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from or1_megatron.runtime.jsonl import read_rows
from or1_megatron.runtime.run_folder import RunFolder, RunFolderBusy, step_of


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_layout_is_as_documented(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "first")
    run.create()
    run.create()  # again does nothing
    run.write_config("run: {}\n")
    run.write_summary({"steps": 3})
    assert names(run.root) == [".id", "checkpoints", "config.yaml", "logs", "rollouts", "summary.json", "tensorboard"]
    assert run.read_summary() == {"steps": 3}
    assert (run.metrics.name, run.hf.name) == ("metrics.jsonl", "hf")


def test_each_folder_has_an_id_of_its_own(tmp_path: Path) -> None:
    """Paths that are one with dashes for slashes, a copy, and another folder at the same path, as another mount
    namespace may have it. The id stays."""
    one, other, copy = (RunFolder(tmp_path / name) for name in ("x/a-b", "x-a/b", "y/a-b"))
    one.create()
    other.create()
    ids = {one.run_id, other.run_id}
    one.create()
    assert one.run_id in ids
    shutil.copytree(one.root, copy.root)
    ids.add(copy.run_id)
    shutil.rmtree(copy.root)
    copy.create()
    assert len(ids | {copy.run_id}) == 4


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(NotADirectoryError, match="run is a file, a folder was expected"):
        RunFolder(tmp_path / "run").create()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(NotADirectoryError, match="link is a broken link, a folder was expected"):
        RunFolder(tmp_path / "link").create()


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
with RunFolder(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_trainer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """Another process holds the folder; its pid and host are in the message; kill -9 of it frees the folder."""
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "locked\n"
        busy = pytest.raises(RunFolderBusy, match=rf"in use by pid {owner.pid} on host {os.uname().nodename}; two")
        with busy, RunFolder(tmp_path).lock(wait_s=0.0):
            pass
    finally:
        owner.kill()
        owner.wait()
    with RunFolder(tmp_path).lock(wait_s=5.0):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunFolderBusy), RunFolder(tmp_path).lock(wait_s=0.0):  # a lock of the same process, too
            pass
    with RunFolder(tmp_path).lock(wait_s=0.0):
        pass


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
