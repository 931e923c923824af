"""Recipes, layouts and shapes by name: from an unpacked wheel in an empty folder, beside files of the same name, and
with names that nothing has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from or1_megatron.commands.app import app
from or1_megatron.config.load import ConfigError, load_config
from or1_megatron.config.recipes import CONFIGS, find, named, shape_like, summary

ROOT = Path(__file__).parents[2]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and none of the variables that recipes read."""
    for name in ("LAYOUT", "MODEL", "DATA", "EVAL", "RUNS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_from_a_wheel(empty: Path, tmp_path: Path) -> None:
    """The wheel of a copy of this tree, unpacked; this tree itself is not on the path."""
    tree, wheels, unpacked = (tmp_path / name for name in ("tree", "wheels", "unpacked"))
    for package in ("or1_megatron", "or1_verify"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, tree]
    subprocess.run(wheel, check=True, capture_output=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as archive:
        archive.extractall(unpacked)

    def or1(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "or1_megatron.commands.app", *arguments],
            env={**os.environ, "PYTHONPATH": str(unpacked), "COLUMNS": "160"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "32 ranks = TP 2 x PP 1 x CP 1 x DP 16" in or1("train", "or1_7b", "--dry-run")
    planned = or1("train", "or1_32b", "--dry-run", "--shape", "deepseek_r1_distill_qwen_14b", "--device", "cuda")
    assert "14,7" in planned and "48 layers" in planned
    assert str(unpacked) in or1("config", "or1_7b", "--key", "model.hf", "--set", f"model.hf={unpacked}")
    assert list(empty.iterdir()) == []


def test_the_list(empty: Path) -> None:
    """Every name on a line of its own, with what its file begins with."""
    result = CliRunner().invoke(app, ["recipes"], env={"COLUMNS": "160"})
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for kind in ("recipe", "layout", "shape"):
        assert set(named(kind)) <= set(lines)
    assert lines["or1_7b"].rstrip().endswith(summary(CONFIGS / "recipes/or1_7b.yaml"))
    assert "7.6 B parameters, 28 layers" in lines["deepseek_r1_distill_qwen_7b"]
    assert all(len(summary(path)) > 20 for kind in ("recipe", "layout") for path in named(kind).values())


def test_a_file_comes_before_a_recipe_of_its_name(empty: Path) -> None:
    (empty / "or1_32b").mkdir()  # a folder is no configuration: the recipe is meant
    (empty / "or1_7b").write_text("base: or1_7b\nrun: {seed: 77}\n")
    result = invoke("config", "or1_7b", "--key", "run.seed")
    assert result.stdout.strip() == "77"
    assert result.stderr.startswith("or1: note: or1_7b is a file here and is used; the recipe of that name is ")
    plain = invoke("config", "or1_32b", "--key", "run.seed")
    assert (plain.stdout.strip(), plain.stderr) == ("1", "")


def test_a_base_by_name(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layout that LAYOUT names; a file beside comes first."""
    (empty / "mine.yaml").write_text("base: or1_7b\noptimizer: {lr: 2.0e-6}\n")
    monkeypatch.setenv("LAYOUT", "7b_2_nodes_h200")
    config = load_config(Path("mine.yaml"))
    assert (config.optimizer.lr, config.parallel.ranks, len(config.stages)) == (2e-6, 16, 2)
    (empty / "or1_7b").write_text("base: or1_math_7b\n")
    assert len(load_config(Path("mine.yaml")).stages) == 4
    (empty / "mine.yaml").write_text("base: or1_9b\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: base: no such file: or1_9b .*; did you mean or1_7b or "):
        load_config(Path("mine.yaml"))
    monkeypatch.setenv("LAYOUT", "7b_2_nodes_h800")
    with pytest.raises(ConfigError, match=r"base: no such file: .*; did you mean .*7b_[28]_nodes"):
        load_config(CONFIGS / "recipes/or1_7b.yaml")


def test_names_that_nothing_has(empty: Path) -> None:
    for command, said in (
        (["train", "or1_math_8b", "--dry-run"], "no recipe of that name; did you mean or1_math_7b"),
        (["train", "zzz", "--dry-run"], "zzz: no such file, and no recipe of that name; there are: or1_235b, or1_32b"),
        (["train", "or1_7b", "--dry-run", "--shape", "qwen3_235b"], "did you mean qwen3_235b_a22b"),
        (["train", "or1_72b", "--dry-run"], "model folder models/reasoning-72b does not exist; expected an HF folder"),
    ):
        result = invoke(*command)
        assert result.exit_code == 2 and result.stderr.startswith("or1: error: ") and said in result.stderr
    assert invoke("train", "or1_72b", "--dry-run", "--set", "model.hf=qwen2_5_72b").exit_code == 0
    assert find("shape", ROOT / "examples/quickstart/base_model") == ROOT / "examples/quickstart/base_model"
    assert shape_like(Path("x/DeepSeek-R1-Distill-Qwen-1.5B")) == CONFIGS / "models/deepseek_r1_distill_qwen_1_5b"
