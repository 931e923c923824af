"""``or1 train --stage N``: what it refuses before anything starts, and (slow) both stages as a user trains them.

``parallel/test_next_stage`` proves that what is carried over is equal to the bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from training import Training, newest_checkpoint, read_rows, refused
from typer.testing import CliRunner

from or1_megatron.checkpoint.manifest import CheckpointDamaged, write_manifest
from or1_megatron.commands.app import app
from or1_megatron.config.load import load_config, resolved_yaml
from or1_megatron.rl.stages import StageSchedule
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.trainer.preflight import begin_of, check_inputs

SmallConfig = Callable[[Path], Path]


def trained(config: Path, folder: Path, steps: int, *overrides: str) -> Path:
    """A run folder of stage 1 with a checkpoint after so many steps, as far as its loop's state goes."""
    loaded = load_config(config, overrides)
    run = RunFolder(folder)
    run.create()
    run.write_config(resolved_yaml(loaded))
    checkpoint = run.checkpoints / f"step_{steps:06d}"
    checkpoint.mkdir()
    state: Mapping[str, Any] = {"steps_done": steps, "schedule": StageSchedule(loaded.stages).state()}
    (checkpoint / "loop.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    return checkpoint


def test_stage_2_without_stage_1(small_config: SmallConfig, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    said = refused(config, stage=2)
    assert f"stage 2 ('long') begins from a checkpoint of stage 1 ('short'), and there is none in {tmp_path}" in said
    assert "run/stage_1, which does not exist; train that stage first (--stage 1), or say" in said
    assert not (tmp_path / "run").exists()
    assert "there is none in elsewhere" in refused(config, "run.previous=elsewhere", stage=2)
    assert "run.stage = 3, but there are 2 stages" in refused(config, stage=3)
    dry = CliRunner().invoke(app, ["plan", str(config), "--set", "run.stage=2"])
    assert dry.exit_code == 0, dry.output


def test_stage_2_before_stage_1_has_ended(small_config: SmallConfig, tmp_path: Path) -> None:
    """After 2 of 3 steps it is refused with three ways out, all of which lead on."""
    config = small_config(tmp_path / "run")
    checkpoint = trained(config, tmp_path / "run" / "stage_1", 2)
    said = refused(config, stage=2)
    assert "stage 2 ('long') begins where stage 1 ('short', 3 steps) has ended" in said
    assert f"{checkpoint} is of step 2 of stage 'short'" in said
    for way, chosen in (("stages.0.steps=2", False), (f"run.previous={checkpoint}", True)):
        assert way.rpartition("/")[0] in said or "run.previous=" in said
        loaded = load_config(config, ["run.stage=2", way])
        begin = begin_of(loaded, RunFolder(loaded.run.folder), whole=True)
        assert begin is not None and (begin.checkpoint, begin.index, begin.chosen) == (checkpoint, 1, chosen)
    done = trained(config, tmp_path / "run" / "stage_1", 3)
    loaded = load_config(config, ["run.stage=2", "parallel.pipeline=1", "parallel.ranks=1"])
    begin = begin_of(loaded, RunFolder(loaded.run.folder))
    assert begin is not None and (begin.checkpoint, begin.chosen) == (done, False)
    check_inputs(loaded, ranks_here=1)
    assert (tmp_path / "run" / "stage_2" / "checkpoints").is_dir()


def test_stage_2_of_another_run(small_config: SmallConfig, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    checkpoint = trained(config, tmp_path / "run" / "stage_1", 3, "stages.0.group_size=8", "run.seed=7")
    said = refused(config, "optimizer.lr=1e-6", stage=2)
    assert "stages.0.group_size: was 8, now 4" in said and "run.seed: was 7, now 1" in said
    assert "optimizer" not in said
    (checkpoint / "loop.json").write_text((checkpoint / "loop.json").read_text() + " ")
    loaded = load_config(config, ["run.stage=2", "stages.0.group_size=8", "run.seed=7"])
    with pytest.raises(CheckpointDamaged, match=r"loop\.json"):
        begin_of(loaded, RunFolder(loaded.run.folder), whole=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_both_stages_by_command(small_config: SmallConfig, train: Callable[..., Training], tmp_path: Path) -> None:
    """Stage 1 runs on one rank. Stage 2 runs on two pipeline stages with the next step sampled ahead and refill. Its
    launcher is killed, so that nobody is left to tell its ranks, which end all the same. Stage 2 is resumed; what stage
    1 left is not touched, and may go once stage 2 has a checkpoint."""
    run = tmp_path / "run"
    config = small_config(run)
    refill = ["stages.1.refill_prompts=8", "rollout.max_staleness=1"]
    status, output = train(config, "run.stage=1", "parallel.ranks=1", "parallel.pipeline=1").finish()
    assert status == 0, output[-3000:]
    assert newest_checkpoint(run / "stage_1") == 3 and (run / "stage_1" / "hf").is_dir()
    training = train(config, "run.stage=2", *refill, hold_after=4)
    training.wait_for_checkpoint(run / "stage_2", 4)
    training.process.kill()
    assert training.finish()[0] != 0 and training.survivors() == []
    shutil.rmtree(run / "stage_1")
    status, output = train(config, "run.stage=2", *refill).finish()
    assert status == 0, output[-3000:]
    rows = {row["step"]: row for row in read_rows(run / "stage_2" / "metrics.jsonl")}
    assert sorted(rows) == [3, 4, 5, 6]
    assert "evaluation/accuracy" in rows[3] and "reward/mean" not in rows[3]
    for step in (4, 5, 6):
        assert rows[step]["stage/index"] == 1
        # a step in which a stop was asked for hands nothing off
        assert rows[step].get("handoff/probe_max_abs_diff", 0.0) < 1e-3
        assert rows[step]["refill/prompts"] >= 0
    assert rows[4]["rollout/staleness"] == 0 and 1 in (rows[5]["rollout/staleness"], rows[6]["rollout/staleness"])
    summary = json.loads((run / "stage_2" / "summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 6 and summary["accuracy_before"] is not None
