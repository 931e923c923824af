"""``or1 plan`` as its user sees it: JSON, tables, refusals; lengths and hardware.

Not proven here: that the times are right (test_engines and test_step_time have the formulas).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.config.hardware import Fit, hardware_of, read_hardware
from or1_megatron.config.load import load_config
from or1_megatron.config.recipes import named
from or1_megatron.plan.lengths import Moment, RecipeLengths, read_lengths
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape

ROOT = Path(__file__).resolve().parents[2]
SEVEN_B = Shape.of(read_hf_config(named("shape")["deepseek_r1_distill_qwen_7b"]))
SMALL = [
    "stages=[{name: a, steps: 10, max_response_tokens: 1024, prompts_per_step: 16, prompts_per_update: 16, "
    "group_size: 4}]",
    "evaluate.data=[]",
    "evaluate.every_steps=0",
]
SMALL_OPTIONS = [part for each in SMALL for part in ("--set", each)]


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    found = CliRunner().invoke(app, ["plan", *arguments])
    assert found.exit_code == code, (found.stdout, found.stderr, found.exception)
    return found.stdout, found.stderr


def test_json() -> None:
    stdout, _ = run("or1_7b", "--gpu", "h800_2025", "--json", *SMALL_OPTIONS)
    found = json.loads(stdout)
    assert found["fits"] is True
    assert set(found["memory"]) == {"trainer rank", "engine"}
    phases = {"start", "rollout", "wake", "update", "handoff", "save"}
    assert all(set(each) == phases for each in found["memory"].values())
    assert set(found["step_s"]) == {"roll_out", "update", "other"}
    steps_h = 10 * sum(found["step_s"].values()) / 3600
    assert found["hours"] == pytest.approx(steps_h)
    assert found["gpu_hours"] == pytest.approx(32 * found["hours"])
    low, high = found["hours_interval"]
    error = read_hardware("h800_2025").error.value
    assert (low, high) == pytest.approx((found["hours"] * (1 - error), found["hours"] * (1 + error)))
    assert found["binds"].split(",")[0] in found["step_s"]


def test_tables() -> None:
    stdout, _ = run("or1_7b", "--gpu", "h800", *SMALL_OPTIONS)
    for part in ("Time of a step, s", "Memory of a GPU", "GPU-hours", "binds", "disk", "the recipe's shape"):
        assert part in stdout


def test_what_does_not_fit_says_what_would_save_most() -> None:
    """The 32B on TP 2 has no room."""
    wide = ["--set", "parallel.tensor=2", "--set", "parallel.recompute=none"]
    options = ["or1_32b", "--gpu", "h800", *SMALL_OPTIONS, *wide]
    _, stderr = run(*options, code=2)
    assert "does not fit: the run needs about" in stderr and "parallel.recompute=full saves" in stderr
    stdout, _ = run(*options, "--json", code=2)
    assert json.loads(stdout)["fits"] is False and "a GPU has 74.51 GiB" in json.loads(stdout)["lacks"][0]
    stdout, _ = run(*options, "--json", "--set", "cluster.gpu_memory_gb=60", code=2)  # as another program leaves
    assert "a GPU has 55.88 GiB" in json.loads(stdout)["lacks"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["or1_7b", "--gpu", "h90"],
            "h90: no such file, and no hardware of that name; there are: a100, a800, cpu",
        ),
        (["or1_8b"], "or1_8b: no such file, and no recipe of that name; did you mean or1_7b"),
        (
            ["or1_7b", "--gpu", "h800", "--lengths", "nowhere"],
            "--lengths nowhere: no rollouts: nowhere/rollouts holds no step_*.parquet",
        ),
    ],
)
def test_refusals(arguments: list[str], said: str) -> None:
    _, stderr = run(*arguments, code=2)
    assert said in stderr


def test_lengths_of_a_run(tmp_path: Path) -> None:
    """Groups are drawn whole: of two groups, whose responses have 7 or 9 and 5000 tokens, one of which was kept."""
    table = {
        "problem_id": ["a", "a", "b", "b"],
        "prompt_token_ids": [[0] * 20] * 4,
        "response_token_ids": [[0] * tokens for tokens in (7, 9, 5000, 5000)],
        "sample_index": [0, 1, 0, 1],
        "kept": [True, True, False, False],
    }
    (tmp_path / "rollouts").mkdir()
    pq.write_table(pa.table(table), tmp_path / "rollouts" / "step_000001.parquet")
    lengths = read_lengths(tmp_path, 2048)
    stages = load_config(named("recipe")["or1_7b"], SMALL).stages
    prompts, drawn = lengths.draw(Moment(stages, 0, 0), 50, 4, 1024, np.random.default_rng(1))
    assert lengths.kept_share == 0.5 and set(prompts.tolist()) == {20}
    for run_or_none in (tmp_path, None):  # longer prompts than the configuration lets in are not planned with
        prompts, _ = read_lengths(run_or_none, 16).draw(Moment(stages, 0, 0), 3, 4, 1024, np.random.default_rng(1))
        assert prompts.tolist() == [16] * 3
    assert all(set(group) <= {7, 9} or set(group) == {1024} for group in drawn.reshape(50, 4).tolist())


def test_the_recipes_shape() -> None:
    """40% of responses above 8K at the start of an 8K stage; the median falls by 0.43 in 540 steps, and no further than
    to a tenth cut off: exp(1.2816) = 3.602 times the median is T then."""
    stages = load_config(named("recipe")["or1_math_7b"], ["evaluate.data=[]"]).stages
    random = np.random.default_rng(1)
    _, drawn = RecipeLengths().draw(Moment(stages, 0, 0), 2000, 16, 8192, random)
    assert (drawn == 8192).mean() == pytest.approx(0.4, abs=0.02)
    medians = [RecipeLengths().median(Moment(stages, 0, step)) for step in (0, 270, 740)]
    assert medians == pytest.approx([6359, 6359 * 0.43**0.5, 8192 / 3.602], rel=1e-3)
    assert RecipeLengths().median(Moment(stages, 1, 0)) == pytest.approx(medians[-1])


def test_hardware_files() -> None:
    """Every figure has a source; cards are found by the name CUDA gives."""
    for name in named("hardware"):
        hardware = read_hardware(name)
        constants = [getattr(hardware, key) for key in type(hardware).model_fields]
        constants += [getattr(each, key) for each in hardware.fits for key in Fit.model_fields]
        assert all(each.source for each in constants if hasattr(each, "source")), name
    assert hardware_of("NVIDIA H100 80GB HBM3") == read_hardware("h100")
    assert hardware_of("NVIDIA GeForce RTX 4090") is None
    assert hardware_of("NVIDIA H800") == read_hardware("h800")
    paper, today = read_hardware("h800_2025"), read_hardware("h800")
    assert paper.rates(7e9).iteration_s != paper.rates(30e9).iteration_s
    assert paper.rates(30e9) == paper.rates(30e9, experts=True)  # it has no mixture's fit
    assert today.rates(30e9).update_share > 2 * today.rates(30e9, experts=True).update_share
