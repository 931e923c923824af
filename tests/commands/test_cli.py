"""The `or1` command: plans, refusals without a traceback and with exit code 2, options that reach their command;
recipes, layouts and shapes by name: from an unpacked wheel in an empty folder, beside files of the same name, and with
names that nothing has.

Training itself is not started here.
"""

from __future__ import annotations

import json
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
from or1_megatron.sizing.run_plan import plan_run

TINY = {
    "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n' * 20 + "\n")
    path = tmp_path / "config.yaml"
    path.write_text(f"""\
run: {{dir: {tmp_path}/run}}
model: {{hf: {tmp_path}/model, dtype: float32}}
data: {{max_prompt_tokens: 32, train: [{{path: {tmp_path}/train.jsonl, repeat: 2}}]}}
stages:
  - {{name: short, steps: 5, max_response_tokens: 64, prompts_per_step: 8, prompts_per_update: 4, group_size: 4}}
parallel: {{ranks: 2, tensor: 2, micro_batch_tokens: 512}}
rollout: {{kv_cache_bytes: 33554432}}
""")
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_plan_prints_the_arithmetic(config: Path) -> None:
    result = invoke("plan", config, "--gpu", "cpu", "--set", "stages.0.steps=10")
    assert result.exit_code == 0, result.output
    rows = {line[:33].strip(): line[33:].strip() for line in result.stdout.splitlines()}
    assert rows["responses per step"] == "32"
    assert rows["N_SGD, SGD steps per step"] == "2"
    assert rows["in epochs"] == "2.00"  # 10 * 8 prompts of 2 * 20
    assert "TP 2 x PP 1 x CP 1 x DP 1" in result.stdout
    planned = plan_run(load_config(config, [f"evaluate.data=[{{path: {config.parent}/train.jsonl}}]"]), "cpu")
    assert (planned.problems, planned.held_out) == ((20,), (20,))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.tnsor=2"], "did you mean parallel.tensor?"),
        (["model.hf=/nowhere/model"], "model folder /nowhere/model does not exist"),
        (["data.train.0.path=/nowhere/p.jsonl"], "data.train: no such file: /nowhere/p.jsonl"),
        (["stages.0.max_response_tokens=999"], "exceeds the 256 tokens that the model's max_position_embeddings"),
    ],
)
def test_what_cannot_work_is_refused_in_a_message(config: Path, overrides: list[str], expected: str) -> None:
    options = [part for override in overrides for part in ("--set", override)]
    for command in ("train", "plan"):
        result = invoke(command, config, *options)
        assert result.exit_code == 2
        assert result.stderr.startswith("or1: error: ")
        assert expected in result.stderr
        assert "Traceback" not in result.stderr


def test_a_missing_data_file_names_the_script_beside_the_configuration(config: Path) -> None:
    """As in a fresh clone, where examples/quickstart/run.sh has not made the quickstart's problems yet."""
    missing = "evaluate.data=[{path: nowhere.jsonl}]"
    for script, said in (("", False), ("run.sh", True)):
        if script:
            (config.parent / script).write_text("")
        result = invoke("train", config, "--check", "--set", missing)
        assert result.exit_code == 2 and "no such file" in result.stderr
        assert (f"{config.parent}/run.sh makes the data" in result.stderr) == said


def test_check_refuses_weights_that_are_still_to_be_downloaded(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has printed the plan. Each of two nodes has one of two ranks."""
    refused = invoke("train", config, "--check", "--device", "cpu")
    assert refused.exit_code == 2 and refused.stderr.startswith(f"or1: error: {config.parent}/model")
    assert "lacks model.safetensors or its index" in refused.stderr
    assert "responses per step" in refused.stdout
    ranks_here: list[int] = []
    monkeypatch.setattr("or1_megatron.trainer.preflight.check_inputs", lambda _, count: ranks_here.append(count))
    invoke("train", config, "--check", "--nnodes", "2", "--device", "cpu")
    assert ranks_here == [1]


def test_check_refuses_adapters_that_are_not_there(config: Path) -> None:
    model = ROOT / "examples/quickstart/base_model"
    changed = "--set", f"model.hf={model}", "--set", f"model.lora={{adapter: {config.parent}/model}}"
    result = invoke("train", config, "--check", "--device", "cpu", *changed)
    assert result.exit_code == 2, result.stdout
    assert f"model.lora.adapter = {config.parent}/model is no folder of adapters" in result.stderr


def test_options_of_nodes_that_contradict_each_other_are_refused_before_the_start(config: Path) -> None:
    result = invoke("train", config, "--check", "--nnodes", "2", "--node-rank", "5", "--device", "cpu")
    assert result.exit_code == 2 and "--node-rank 5: expected 0 to 1, since --nnodes is 2" in result.stderr


def test_a_corrupt_model_config_is_named(config: Path) -> None:
    (config.parent / "model" / "config.json").write_text('{"num_hidden')
    result = invoke("plan", config)
    assert result.exit_code == 2
    assert "config.json is not valid JSON" in result.stderr


HELP_BARE = """
import sys
for name in ("torch", "megatron", "vllm", "ray", "transformers", "numpy"):
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
import typer
from or1_megatron.commands.app import app

def ask(command, *path):
    assert app([*path, "--help"], prog_name="or1", standalone_mode=False) == 0, path
    for name, inner in getattr(command, "commands", {}).items():
        ask(inner, *path, name)

ask(typer.main.get_command(app))
"""


def test_help_imports_nothing_that_takes_seconds() -> None:
    """That of `or1`, of every command and of every command below it."""
    done = subprocess.run([sys.executable, "-c", HELP_BARE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("train", "eval", "data build", "convert hf-to-megatron"):
        assert f"Usage: or1 {words} " in done.stdout


ROOT = Path(__file__).parents[2]


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

    assert "32 ranks = TP 2 x PP 1 x CP 1 x DP 16" in or1("plan", "or1_7b")
    planned = or1("plan", "or1_32b", "--shape", "deepseek_r1_distill_qwen_14b")
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
        (["plan", "or1_math_8b"], "no recipe of that name; did you mean or1_math_7b"),
        (["train", "zzz", "--check"], "zzz: no such file, and no recipe of that name; there are: or1_235b, or1_32b"),
        (["plan", "or1_7b", "--shape", "qwen3_235b"], "did you mean qwen3_235b_a22b"),
        (["plan", "or1_72b"], "model folder models/reasoning-72b does not exist; expected an HF folder"),
    ):
        result = invoke(*command)
        assert result.exit_code == 2 and "or1: error: " in result.stderr and said in result.stderr
    assert invoke("plan", "or1_72b", "--set", "model.hf=qwen2_5_72b").exit_code == 0
    assert find("shape", ROOT / "examples/quickstart/base_model") == ROOT / "examples/quickstart/base_model"
    assert shape_like(Path("x/DeepSeek-R1-Distill-Qwen-1.5B")) == CONFIGS / "models/deepseek_r1_distill_qwen_1_5b"
