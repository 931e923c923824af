"""Updates without a finite loss or gradient leave no trace; their dumps replay at other layouts than they were made at.

Dumped at TP2 with sequence parallelism by real Megatron on gloo; replayed by the command, in one process and at PP2.
Not proven here: bf16, GPUs, and that a dump of a large model fits the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from rich.console import Console

from or1_megatron.commands.replay import differ, repeat_update
from or1_megatron.rl.dump import DumpError, read_dump, write_dump
from or1_megatron.sizing.parallel_layouts import LayoutError
from or1_megatron.types import UpdateReport

SEEN = UpdateReport({"loss": 4.0}, 8, 2.0, 1e-6, False, 0.0, 0.0)
NOT_FINITE = replace(SEEN, sums={"loss": float("nan")}, grad_norm=float("inf"), skipped=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: Path) -> tuple[Path, Any]:
    """Return (folder of the dumps, what the worker saw)."""
    folder = tmp_path_factory.mktemp("replay")
    return folder / "dumps", ranks.run_json(
        "update_worker.py", 2, folder / "seen.json", str(tiny_qwen2), str(folder / "dumps")
    )


def replayed(dump: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "or1_megatron.commands.app", "replay", str(dump), *options],
        env={**os.environ, "PYTHONPATH": str(ranks.ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ranks.TIMEOUT_S,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("layout", ["TP2 SP", "DP2", "CP2", "PP2 VPP2"])
def test_the_frozen_reference_stays_what_the_policy_was(layout: str, made: tuple[Path, Any]) -> None:
    """To the bit, at the policy's layout, while the policy moves on; between passes nothing of it is on the device."""
    seen = made[1][layout]["reference"]
    assert seen == {"exact": [True, True], "held_bytes": [0, 0], "policy moved": True}


@pytest.mark.parametrize("layout", ["TP2 SP", "DP2", "CP2", "PP2 VPP2"])
def test_an_update_tells_what_a_score_before_it_would_have(layout: str, made: tuple[Path, Any]) -> None:
    """Log-prob and entropy of every token, sample by sample; at CP2 with the head that works tile by tile."""
    assert made[1][layout]["score and update apart"] < 1e-6


@pytest.mark.parametrize("layout", ["TP2 SP", "DP2", "CP2", "PP2 VPP2"])
def test_a_bad_update_is_skipped_on_all_ranks_and_leaves_no_bit_changed(layout: str, made: tuple[Path, Any]) -> None:
    """An infinite loss with finite gradients, a finite loss with a gradient that is not, and an infinite advantage;
    at DP2 only one of the ranks sees that."""
    seen = made[1][layout]
    assert not seen["good"] and not seen["again"] and seen["moved"]
    assert {name: (skipped, unchanged) for name, (skipped, _, _, unchanged) in seen["seen"].items()} == {
        "loss": (True, True),
        "gradient": (True, True),
        "both": (True, True),
    }
    assert seen["seen"]["loss"][1] == "inf" and np.isfinite(float(seen["seen"]["loss"][2]))
    assert seen["seen"]["gradient"][1] == "0.0" and not np.isfinite(float(seen["seen"]["gradient"][2]))


def test_a_good_update_is_reproduced_at_a_pipeline(made: tuple[Path, Any], tmp_path: Path) -> None:
    dump = made[0] / "step_000007_update_0"
    status, output = replayed(dump, "--layout", "PP2", "--out", str(tmp_path / "found.json"))
    assert status == 0, output
    assert "reproduced: the same within 0.0001" in output and "not finite: 0" in output
    found, recorded = json.loads((tmp_path / "found.json").read_text()), read_dump(dump).report
    assert float(found["grad_norm"]) == pytest.approx(recorded.grad_norm, rel=1e-5)
    assert float(found["sums"]["entropy"]) == pytest.approx(recorded.sums["entropy"], rel=1e-5)
    assert found["log_prob_difference"] < 1e-5


@pytest.mark.slow
def test_with_other_weights_it_is_not_reproduced(made: tuple[Path, Any], tiny_qwen2: Path) -> None:
    """The model as it was before the updates that came first."""
    status, output = replayed(made[0] / "step_000007_update_0", "--model", str(tiny_qwen2))
    assert status == 1 and "not reproduced: gradient norm was" in output, output


@pytest.mark.slow
def test_a_dump_of_an_update_that_raised(made: tuple[Path, Any], tmp_path: Path) -> None:
    """It has no weights and no log-probs: the update is made on the model that is given, and goes through here."""
    made_dump, folder = read_dump(made[0] / "step_000007_update_0"), tmp_path / "raised"
    folder.mkdir()
    write_dump(folder, replace(made_dump, reason="raised", raised="RuntimeError: out of memory", log_probs=()))
    status, output = replayed(folder, "--model", str(made[0] / "step_000007_update_0" / "weights"))
    assert status == 1, output
    assert "not reproduced: in the run the update raised 'RuntimeError: out of memory', now it went through" in output


@pytest.mark.slow
def test_a_bad_update_is_reproduced_in_one_process(made: tuple[Path, Any]) -> None:
    """The sample with the infinite advantage: the loss is bad, no log-prob is."""
    dump = made[0] / "step_000008_update_1"
    status, output = replayed(dump)
    assert status == 0, output
    assert "reproduced: again not finite" in output and "log-prob that is not finite: 0" in output


def test_a_bad_update_is_dumped(made: tuple[Path, Any]) -> None:
    dump = made[0] / "step_000008_update_1"
    assert f"or1 replay {dump}" in made[1]["TP2 SP"]["told"][0]
    found = read_dump(dump)
    assert found.report.skipped and float("inf") in [sample.advantage for sample in found.samples]
    assert (dump / "weights" / "config.json").is_file()


def test_what_cannot_be_replayed_is_refused(made: tuple[Path, Any], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(made[0] / "step_000008_update_1", bare, ignore=shutil.ignore_patterns("weights"))
    with pytest.raises(DumpError, match=r"holds no weights.*as it was after step 7"):
        repeat_update(bare, "1", None, None, Console())
    with pytest.raises(LayoutError, match="layout 'TP3' cannot work"):
        repeat_update(made[0] / "step_000008_update_1", "TP3", None, None, Console())


def test_differ() -> None:
    """Loss 0.5 per token, to within 1e-4 of 1; norm 2, to within 1e-4 of itself."""
    near = replace(SEEN, sums={"loss": 4.0007}, grad_norm=2.00019)
    assert list(differ(SEEN, near, 1e-4)) == []
    assert len(list(differ(SEEN, replace(near, sums={"loss": 4.0009}), 1e-4))) == 1
    assert len(list(differ(SEEN, replace(near, grad_norm=2.00021), 1e-4))) == 1
    assert list(differ(NOT_FINITE, NOT_FINITE, 1e-4)) == []
    assert "now it was finite" in next(differ(NOT_FINITE, SEEN, 1e-4))
    assert len(list(differ(SEEN, NOT_FINITE, 1e-4))) == 3
