"""The lengths and the KV cache that ``or1 eval`` chooses for a local model, and that it runs with them, on CPU.

Not proven here: GPUs, and that vLLM decodes as many responses at once as the cache is meant for.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from or1_megatron.commands.open_model import LocalModel, cpu_kv_cache_bytes, with_length
from or1_megatron.config.schema import RolloutConfig
from or1_megatron.data.problems import load_problems
from or1_megatron.evaluate.settings import EvaluationSettings
from or1_megatron.rollout.engine_pool import EngineError
from or1_megatron.runtime import nvidia_driver
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape

BASE = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "base_model"
CONTEXT = 512  # of its config.json
SUMS = ["1+1?", "1+2+3+4?", "12+34?"]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in SUMS))
    return path


def longest_prompt() -> int:
    """By transformers' own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    turns = [[{"role": "user", "content": text}] for text in SUMS]
    ids = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]
    return max(map(len, ids))


def chosen(problems: Path, out: Path, model: str = str(BASE), **settings: Any) -> tuple[int | None, str]:
    given, console = EvaluationSettings.model_validate(settings), Console(file=io.StringIO())
    with console.capture() as said:
        chosen_settings = with_length(given, model, load_problems(problems), out, console)
    return chosen_settings.max_response_tokens, said.get()


def test_the_response_length_is_what_the_longest_prompt_leaves_of_the_context(problems: Path, tmp_path: Path) -> None:
    """Unless it is given, or an evaluation was begun with another; an endpoint's context is not known."""
    out, prompt = tmp_path / "out", longest_prompt()
    length, said = chosen(problems, out)
    assert length == CONTEXT - prompt
    assert f"up to {length} tokens, the model's context of {CONTEXT} less the longest prompt's {prompt}" in said
    assert chosen(problems, out, max_response_tokens=7) == (7, "")
    assert chosen(problems, out, model="http://127.0.0.1:9/v1") == (32768, "")
    out.mkdir()
    (out / "evaluation.json").write_text(json.dumps({"max_response_tokens": 77}))
    assert chosen(problems, out)[0] == length  # nothing was sampled yet
    (out / "responses.jsonl").write_text("{}\n")
    assert chosen(problems, out) == (77, "")


def test_the_kv_cache_by_hand() -> None:
    """4 layers, 2 key/value heads of 32, fp32: keys and values of a token take 2 * 4 * 2 * 32 * 4 = 2,048 bytes. 100
    tokens are 4 blocks of 32; one block more is vLLM's own."""
    shape = Shape.of(read_hf_config(BASE))
    weights = 4 * sum(each.numel() for each in _tensors())
    block = 32 * 2048
    free = 10**9

    def bytes_of(places: int, free_bytes: int = free, **engines: int) -> int:
        return cpu_kv_cache_bytes(shape, "float32", RolloutConfig(**engines), 100, places, free_bytes)

    assert bytes_of(1) == 5 * block
    assert bytes_of(8) == 33 * block
    assert bytes_of(8, tensor_parallel=2) == 33 * block // 2  # each rank has one of the two heads
    for engines in (1, 2):  # together half of what the weights leave
        limited = bytes_of(1000, free_bytes=weights * engines + 40_000_000, engines=engines)
        assert limited == pytest.approx(20_000_000 / engines, rel=1e-3)
    with pytest.raises(EngineError, match=r"0\.0 GB of memory are free.*one response of 100 tokens.*set engines\.kv"):
        bytes_of(1, free_bytes=weights + 1000)


def _tensors() -> list[Any]:
    from safetensors.torch import load_file

    return list(load_file(BASE / "model.safetensors").values())


def test_a_new_user_evaluates_a_tiny_model_without_a_gpu(problems: Path, tmp_path: Path) -> None:
    """No size is given; what was chosen is said. The same command again starts nothing.

    In a process of its own, as this one may be connected to Ray already.
    """
    command = ["eval", "--model", str(BASE), "--data", str(problems), "--out", str(tmp_path / "out"), "--k", "2"]
    for begun in (False, True):
        program = [sys.executable, "-m", "or1_megatron.commands.app", *command]
        ended = subprocess.run(program, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = [line for line in ended.stdout.splitlines() if "KV cache" in line or "context" in line]
        assert len(lines) == (0 if begun else 2), ended.stdout
        if not begun:
            assert lines[0].startswith(f"responses of up to {CONTEXT - longest_prompt()} tokens, ")
            assert "MiB per engine, as there is no GPU" in lines[1]
    assert len((tmp_path / "out" / "responses.jsonl").read_text().splitlines()) == 6


def test_an_old_driver_is_refused_before_the_folder_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For ``or1 data build`` too, which meets its models in the middle of other steps."""
    monkeypatch.setattr(nvidia_driver, "driver_problem", lambda: "the driver is too old")
    with pytest.raises(nvidia_driver.DriverTooOld, match="too old"):
        LocalModel(tmp_path / "not there")
