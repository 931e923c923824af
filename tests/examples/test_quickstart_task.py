"""The quickstart's problems, tokenizer and demonstrations, against Python's own arithmetic and hand-worked cases.

Not proven here: that a model learns from the demonstrations (the base model's recorded measurements say that).
"""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import demonstrations as demos
import pytest
import task
import tokenizer as tokenizer_module
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

QUICKSTART = Path(task.__file__).resolve().parent
ARITHMETIC = re.compile(r"[0-9+\-*()]+")


@pytest.fixture(scope="module", params=["alone", "beside a qwen2 config"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """The tokenizer as users get it: loaded by AutoTokenizer, which heeds the config of a model in the same folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    built = tokenizer_module.build_tokenizer()
    built.save_pretrained(folder)
    if request.param != "alone":
        Qwen2Config(vocab_size=len(built)).save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def examples() -> list[demos.Demonstration]:
    return list(islice(demos.demonstrations(seed=3), 600))


def python_value(expression: str) -> int:
    """Python's value of an arithmetic text; anything but digits, + - * and brackets fails the test."""
    assert ARITHMETIC.fullmatch(expression), expression
    return int(eval(compile(expression, "problem", "eval"), {"__builtins__": {}}))


def python_subvalues(expression: str) -> list[int]:
    """Values of every subexpression of an arithmetic text, by Python's own parser."""
    nodes = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.BinOp)]
    return [python_value(ast.unparse(node).replace(" ", "")) for node in nodes]


def statement(problem: task.Problem) -> str:
    return problem.text.removeprefix("Compute ").removesuffix(".")


@pytest.mark.parametrize("operations", [*task.OPERATION_COUNTS, 16])
def test_problems_have_pythons_answer_and_stay_in_range(operations: int) -> None:
    rng = random.Random(operations)
    for _ in range(300):
        problem = task.make_problem(rng, operations)
        text = statement(problem)
        assert python_value(text) == problem.answer
        assert sum(text.count(sign) for sign in "+-*") == operations == problem.operations
        assert "(" in text
        values = python_subvalues(text)
        assert len(values) == operations
        assert 0 <= min(values) and max(values) <= task.MAX_VALUE


def test_sets_of_different_seeds_are_disjoint_and_the_split_ignores_spacing() -> None:
    train = {task.normalise(problem.text) for problem in islice(task.draw_problems(0, held_out=False), 3000)}
    held_out = {task.normalise(problem.text) for problem in islice(task.draw_problems(1, held_out=True), 500)}
    assert len(train) == 3000 and len(held_out) == 500
    assert not train & held_out
    for text in ("Compute 3*(4+1).", "Compute 5-(2+2)."):
        assert task.is_held_out(text) == task.is_held_out(f" {text.lower().replace('*', ' * ')}\n")


def test_the_split_is_the_same_for_ever() -> None:
    """Pinned by `printf 'compute8-(8-3).' | sha256sum`: held out where the first 16 hex digits are 0 modulo 8."""
    assert task.is_held_out("Compute 8-(8-3).")  # 74d830630a1376f0
    assert not task.is_held_out("Compute 3*(4+2).")  # e89d0373084aa723


def test_demonstrations_use_training_problems_only(examples: list[demos.Demonstration]) -> None:
    assert not any(task.is_held_out(example.problem.text) for example in examples)


def test_command_writes_both_sets_and_leaves_identical_files_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(QUICKSTART / "task.py"), "--out", str(tmp_path / "data"), "--train", "30"]
    command += ["--held-out", "9", "--seed", "5"]
    subprocess.run(command, check=True, capture_output=True)
    train, held_out = tmp_path / "data" / "train.jsonl", tmp_path / "data" / "heldout.jsonl"
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert [row["extra_info"]["index"] for row in rows] == list(range(30))
    assert {row["data_source"][-4:] for row in rows} == {"2ops", "3ops", "4ops"}
    assert len(held_out.read_text().splitlines()) == 9
    assert all(task.is_held_out(json.loads(line)["prompt"][0]["content"]) for line in held_out.open())
    before = train.stat().st_mtime_ns
    held_out.write_text("damaged")
    subprocess.run(command, check=True, capture_output=True)
    assert train.stat().st_mtime_ns == before
    assert len(held_out.read_text().splitlines()) == 9
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["heldout.jsonl", "train.jsonl"]


def test_a_generation_prompt_opens_the_reasoning(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "maybe "}, {"role": "user", "content": "Compute 1+(2+3)."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>maybe <|user|>Compute 1+(2+3).<|assistant|><think>\n"
    history = [messages[1], {"role": "assistant", "content": "1</think>\\boxed{6}"}, messages[1]]
    text = tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|user|>Compute 1+(2+3).<|assistant|>\\boxed{6}<|end|><|user|>Compute 1+(2+3).<|assistant|><think>\n"
    )


def test_everything_round_trips(tokenizer: PreTrainedTokenizerFast, examples: list[demos.Demonstration]) -> None:
    assert len(tokenizer) % tokenizer_module.VOCABULARY_MULTIPLE == 0
    for example in examples:
        prompt = tokenizer.apply_chat_template(example.prompt_messages, add_generation_prompt=True, tokenize=False)
        for text in (prompt, example.response, example.problem.text):
            ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
        response_ids = tokenizer.encode(example.response)
        assert tokenizer.decode([*response_ids, tokenizer.eos_token_id], skip_special_tokens=True) == example.response


def test_every_careful_step_is_right(examples: list[demos.Demonstration]) -> None:
    """Each line's equation holds, and what is left after it still has the answer's value and one operation less."""
    careful = [example for example in examples if example.habit == demos.CAREFUL]
    assert len(careful) > 100
    for example in careful:
        reasoning, final = example.response.removeprefix(demos.CAREFUL_PREFIX).split("</think>")
        assert final == f"\\boxed{{{python_value(statement(example.problem))}}}"
        lines = reasoning.splitlines()
        assert len(lines) == example.problem.operations
        for done, line in enumerate(lines, start=1):
            left, right, *rest = ARITHMETIC.findall(line)
            assert python_value(left) == int(right)
            assert f"{left}={right}" in line
            remaining = rest[0] if rest else right
            assert python_value(remaining) == example.problem.answer
            assert sum(remaining.count(sign) for sign in "+-*") == example.problem.operations - done
