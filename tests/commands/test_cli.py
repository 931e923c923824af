"""The `or1` command: dry run, refusals without a traceback and with exit code 2, options that reach their command.

Training itself is not started here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from or1_megatron.commands.app import app

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


def test_dry_run_prints_the_arithmetic(config: Path) -> None:
    result = invoke("train", config, "--dry-run", "--device", "cpu", "--set", "stages.0.steps=10")
    assert result.exit_code == 0, result.output
    rows = {line[:33].strip(): line[33:].strip() for line in result.stdout.splitlines()}
    assert rows["responses per step"] == "32"
    assert rows["N_SGD, SGD steps per step"] == "2"
    assert rows["in epochs"] == "2.00"  # 10 * 8 prompts of 2 * 20
    assert "TP 2 x PP 1 x CP 1 x DP 1" in result.stdout


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
    for dry_run in ([], ["--dry-run"]):
        result = invoke("train", config, *options, *dry_run)
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
        result = invoke("train", config, "--dry-run", "--set", missing)
        assert result.exit_code == 2 and "no such file" in result.stderr
        assert (f"{config.parent}/run.sh makes the data" in result.stderr) == said


def test_check_refuses_what_the_dry_run_says_is_not_there_yet(config: Path) -> None:
    """Weights that are still to be downloaded: planned with, not started with. Both print the plan first."""
    planned, refused = (invoke("train", config, how, "--device", "cpu") for how in ("--dry-run", "--check"))
    said = "lacks model.safetensors or its index"
    assert planned.exit_code == 0 and f"or1: not there yet: {config.parent}/model" in planned.stderr
    assert said in planned.stderr
    assert refused.exit_code == 2 and refused.stderr.startswith("or1: error: ") and said in refused.stderr
    assert "responses per step" in planned.stdout and "responses per step" in refused.stdout


def test_options_of_nodes_that_contradict_each_other_are_refused_before_the_start(config: Path) -> None:
    result = invoke("train", config, "--check", "--nnodes", "2", "--node-rank", "5", "--device", "cpu")
    assert result.exit_code == 2 and "--node-rank 5: expected 0 to 1, since --nnodes is 2" in result.stderr


def test_a_corrupt_model_config_is_named(config: Path) -> None:
    (config.parent / "model" / "config.json").write_text('{"num_hidden')
    result = invoke("train", config, "--dry-run")
    assert result.exit_code == 2
    assert "config.json is not valid JSON" in result.stderr


def test_rollouts_of_no_run(tmp_path: Path) -> None:
    result = invoke("rollouts", tmp_path / "none")
    assert result.exit_code == 2
    assert "none" in result.stderr
    assert "Traceback" not in result.stderr


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
