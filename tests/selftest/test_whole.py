"""The whole self-test on CPU, as lab/benchmarks/gpu/run.sh runs it; what a CPU can carry out of the check "sleep". On a
GPU each check alone: those that can be made without vLLM and Ray, and with them the others.

Not proven here: every speed (a check does not fail on them); on CPU that a GPU's memory comes free, Transformer
Engine's layers, NCCL and CUDA IPC.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from or1_megatron.selftest.known_checks import CHECKS, chosen

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ELSEWHERE = {"sleep": "GPU", "train-separate": "GPU"}
"""Checks that are not possible on one machine without a GPU, and a word of the reason."""


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_whole_on_cpu(tmp_path: Path) -> None:
    """All that CPU can do passes; the rest says why not; figures and report are where they are looked for."""
    # without this session's mark: its last word would take the script's processes for its own
    environment = {name: value for name, value in os.environ.items() if name != "OR1_TEST_SESSION"}
    done = subprocess.run(
        [ROOT / "lab/benchmarks/gpu/run.sh", "--tiny", "--minutes", "60", "--out", tmp_path],
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=3700,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert report["finished"]
    outcomes = {outcome["name"]: outcome for outcome in report["outcomes"]}
    assert set(outcomes) == {check.name for check in CHECKS}
    for name, outcome in outcomes.items():
        if name in ELSEWHERE:
            assert outcome["status"] == "not possible" and ELSEWHERE[name] in outcome["reason"], outcome
        elif name != "sandbox":  # this machine may grant neither tier
            assert outcome["status"] == "passed" and outcome["figures"], outcome
    assert outcomes["train"]["figures"]["steps"]["value"] == 5


@pytest.mark.slow
def test_sleep_finds_that_a_cpu_frees_nothing(tmp_path: Path) -> None:
    """vLLM accepts sleep on CPU and ignores it: the check goes on to the probe, and says that no memory came free."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(FOLDER), str(ROOT)))}
    subprocess.run([sys.executable, FOLDER / "odd_checks.py", tmp_path, "sleeps"], env=environment, timeout=1200)
    (outcome,) = json.loads((tmp_path / "selftest.json").read_text())["outcomes"]
    figures = outcome["figures"]
    assert figures["largest log-prob difference after waking, fp32"]["met"], outcome
    assert not figures["memory that came free / memory that the engines took"]["met"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [check.name for check in chosen(())])
def test_check(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "or1_megatron.commands.app", "selftest", name, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (outcome,) = json.loads((tmp_path / "selftest.json").read_text())["outcomes"]
    if outcome["status"] == "not possible":
        pytest.skip(outcome["reason"])
    assert done.returncode == 0, done.stdout[-4000:]
