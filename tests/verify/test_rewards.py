"""``or1_verify.rewards`` as TRL, verl, slime and verifiers' Rubric call it.

The calls are those of TRL 1.16, verl b178a3cd5, slime 0b420f1ef and the documentation of verifiers, made by hand. The
slow test trains a step with TRL itself; that the others run with it is not shown.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from or1_verify import rewards

RIGHT, WRONG, OPEN = "</think> \\boxed{12}", "</think> \\boxed{13}", "so \\boxed{12}"
TESTS = {"inputs": ["1\n"], "outputs": ["2\n"]}


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


def sample(response: str, prompt: Any = "1 + 11?", status: Status = Status.COMPLETED, label: Any = "12") -> Any:
    return SimpleNamespace(response=response, prompt=prompt, status=status, label=label)


STEP = """
import sys, datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from or1_verify.rewards import trl

known = {word: n for n, word in enumerate(["<pad>", "<end>", *map(str, range(30))])}
words = Tokenizer(models.WordLevel(known, "<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
data = datasets.Dataset.from_list([{"prompt": "1 11", "answer": "12"}] * 4)
config = GRPOConfig(sys.argv[2], max_steps=1, per_device_train_batch_size=2, num_generations=2, logging_steps=1,
                    max_completion_length=4, use_cpu=True, bf16=False, report_to=[], save_strategy="no")
trainer = GRPOTrainer(sys.argv[1], trl, config, data, processing_class=tokenizer)
trainer.train()
print(trainer.state.log_history[0]["rewards/trl/mean"])
"""


@pytest.mark.slow
def test_trl_trains_a_step(tiny_qwen2: Path, tmp_path: Path) -> None:
    """TRL comes from PyPI for this test alone. The random model is never right."""
    wanted = ("trl==1.16.0", "accelerate==1.15.0")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "trl"), *wanted]
    if (done := subprocess.run(pip, capture_output=True, text=True)).returncode:
        pytest.skip(f"TRL cannot be had: {done.stderr[-200:]}")
    path = os.pathsep.join([str(tmp_path / "trl"), str(Path(rewards.__file__).parents[1])])
    command = [sys.executable, "-c", STEP, str(tiny_qwen2), str(tmp_path / "out")]
    step = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert step.stdout.splitlines()[-1:] == ["0.0"], step.stderr[-2000:]


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    """End the verifiers here, and not at the end of the process."""
    at_the_end: list[Callable[[], None]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards.atexit, "register", at_the_end.append)
        yield
    for end in at_the_end:
        end()
    rewards._threads.cache_clear()


@pytest.mark.parametrize("column", ["ground_truth", "answer", "solution"])
def test_trl(column: str) -> None:
    """Texts and messages; golds as an answer and as a JSON list. Columns are keywords beside TRL's own."""
    own = {"prompts": ["?"] * 3, "completion_ids": [[1]] * 3, "trainer_state": None, "log_extra": print}
    truths = {column: ["12", '["11", "12"]', "12"]}
    completions = [RIGHT, [{"role": "assistant", "content": RIGHT}], WRONG]
    assert rewards.trl(completions=completions, **own, **truths) == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"columns .*'gold', .*expected one of: ground_truth, answer, solution"):
        rewards.trl(completions=completions, **own, gold=["12"] * 3)


def test_verl() -> None:
    assert [*inspect.signature(rewards.verl).parameters][:4] == [
        "data_source", "solution_str", "ground_truth", "extra_info",
    ]  # fmt: skip
    result = rewards.verl(data_source="s", solution_str=RIGHT, ground_truth="12", extra_info={"index": 1}, mine=2)
    assert result == {"score": 1.0, "acc": 1.0}
    assert rewards.verl("s", WRONG, ["12"]) == {"score": 0.0, "acc": 0.0}
    with pytest.raises(ValueError, match="among the answers"):
        rewards.verl("s", RIGHT, "  ")


def test_slime() -> None:
    """A prompt that opened the reasoning, what was cut off, and a group; code by its tests."""
    one = [
        sample(RIGHT), sample(WRONG), sample(RIGHT, status=Status.TRUNCATED), sample(OPEN), sample(OPEN, "?<think>\n"),
        sample("```python\nprint(int(input()) + 1)\n```", label=TESTS),
    ]  # fmt: skip
    expected = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert [asyncio.run(rewards.slime(None, item)) for item in one] == expected
    assert asyncio.run(rewards.slime(None, one, evaluation=False)) == expected


def test_rubric() -> None:
    """verifiers passes, by name, what the signature has; completions are messages, or text."""
    call = {"prompt": [], "completion": [{"role": "assistant", "content": RIGHT}], "answer": "12", "state": {}}
    assert asyncio.run(rewards.rubric(**call)) == 1.0
    assert asyncio.run(rewards.rubric(**{**call, "completion": WRONG})) == 0.0
