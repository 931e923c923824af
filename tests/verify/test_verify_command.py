"""``or1-verify`` and users' own verifiers, end to end on small files: rows out, tables, resuming, refusals.

Not proven here: verdicts themselves (test_math_verifier.py, test_code_corpus.py); large files.
"""

from __future__ import annotations

import datetime
import io
import json
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from or1_verify.command import main
from or1_verify.config import VerifyConfig
from or1_verify.custom import CustomVerifier, VerifierBroken
from or1_verify.types import Message, Problem
from or1_verify.verifiers import build_verifiers

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

MINE = """
import os, time
import numpy as np
from or1_verify.types import Verdict

def parity(problem, response, truncated):
    if "raise" in response: raise KeyError("mine")
    if "sleep" in response: time.sleep(60)
    if "die" in response: os._exit(3)
    if "odd" in response: return "0.5"
    if "nan" in response: return np.float32("nan")
    if "low" in response: return {"reward": -2}
    if "numpy" in response: return np.bool_(True)
    if "half" in response: return {"score": np.float32(0.5), "acc": False}
    print("noise on standard output")
    return response.strip() == problem.ground_truth

class Polite:
    def check_ground_truth(self, problem):
        if "x" not in problem.ground_truth: raise ValueError("expected an x")
    def verify(self, problem, response, truncated):
        return Verdict(1.0, "right", response, "because", 0.0)

class Boasting:
    def verify(self, problem, response, truncated):
        return Verdict(1.0, "wrong", "", "", 0.0)

NUMBER = 3

def as_verl(data_source, solution_str, ground_truth, extra_info=None):
    return (data_source, solution_str, ground_truth, extra_info["model_difficulty"]) == ("s", "a", "7", {"m": 3})

def as_trl(completions, **kwargs): return [1.0]
def swapped(response, problem, truncated): return 1
def lacking(data_source, solution_str, ground_truth, tokenizer): return 1
"""


def row(
    response: Any, source: str = "s", ability: str = "parity", truth: str = '["even"]', **more: Any
) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "q"}],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": 7, "model_difficulty": None},
        "response": response,
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_verifiers.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Result:
    """How the command ended, and what it wrote."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(*arguments: object) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        exit_code = main([str(argument) for argument in arguments])
    return Result(exit_code, out.getvalue(), err.getvalue())


CODE = json.dumps({"inputs": ["1\n"], "outputs": ["2"]})


@needs_bubblewrap
def test_rows_come_back_in_order_with_their_verdicts(folder: Path) -> None:
    good, bad = ("</think>\n```python\nprint(int(input()) + 1)\n```", "</think>\n```python\nprint(0)\n```")
    rows = [
        row("</think>\\boxed{12}", "maths", "math", '["12"]', kept={"any": ["key", 1.5]}),
        row("</think>\\boxed{13}", "maths", "math", '["12"]'),
        row(good, "codes", "code", CODE),
        row(bad, "codes", "code", CODE, truncated=False),
        row(good, "codes", "code", CODE, truncated=True),
        row("no box", "maths", "math", '["12"]', truncated=None),
    ]
    file = write(folder / "rows.jsonl", rows)
    result = run(file, "--out", folder / "one.jsonl", "--explain")
    assert result.exit_code == 0, result.output
    out = read(folder / "one.jsonl")
    assert [item["status"] for item in out] == ["right", "wrong", "right", "wrong", "truncated", "no_answer"]
    assert [item["reward"] for item in out] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert [{key: item[key] for key in given} for item, given in zip(out, rows, strict=True)] == rows
    assert "0 of 1 tests passed [F]; test 0: wrong output: '0\\n', expected '2'" in out[3]["detail"]
    table = [line.split() for line in result.stdout.splitlines()[-4:]]
    assert table[0] == ["source", "rows", "accuracy", "right", "wrong", "truncated", "no_answer"]
    assert table[1:] == [
        ["codes", "3", "0.333", "1", "1", "1", "0"],
        ["maths", "3", "0.333", "1", "1", "0", "1"],
        ["all", "6", "0.333", "2", "2", "1", "1"],
    ]
    assert re.search(r"rows\.jsonl:4  wrong  0  codes  0 of 1 tests passed", result.stdout)

    half = folder / "half.jsonl"
    lines = (folder / "one.jsonl").read_text().splitlines(keepends=True)
    half.write_text("".join(lines[:3]) + lines[3][:20])  # as a kill leaves it
    assert run(file, "--out", half, "--workers", 3).exit_code == 0
    assert half.read_text() == (folder / "one.jsonl").read_text()


def test_bad_rows_are_named(folder: Path) -> None:
    cases = {
        "rows.jsonl:2: field 'response': found 3": [row("x"), row(3)],
        "rows.jsonl:1: field 'truncated': found 'no'": [row("x", truncated="no")],
    }
    for words, rows in cases.items():
        result = run(write(folder / "rows.jsonl", rows), "--out", folder / "out.jsonl")
        assert result.exit_code == 2 and words in result.output.replace("\n", " "), (words, result.output)
        assert not (folder / "out.jsonl").exists()
    assert "no such file" in run(folder / "none.jsonl", "--out", folder / "out.jsonl").output
    write(folder / "other.jsonl", [{"status": "right"}])
    file = write(folder / "rows.jsonl", [row("</think>\\boxed{1}", ability="math", truth='["1"]')])
    assert "other.jsonl:1: is no verdict on row 1" in run(file, "--out", folder / "other.jsonl").output


def test_files_that_cannot_be_used_are_an_error_in_words(folder: Path) -> None:
    file = write(folder / "rows.jsonl", [row("</think>\\boxed{1}", ability="math", truth='["1"]')])
    text = file.read_text()
    (folder / "rows.parquet").write_bytes(b"PAR1 nonsense")
    (folder / "deep.jsonl").write_text('{"a":' + "[" * 100_000 + "\n")
    for words, given, out in (
        ("is the input; expected another file", file, file),
        ("there is no folder", file, folder / "none" / "out.jsonl"),
        ("not a readable parquet file", folder / "rows.parquet", folder / "out.jsonl"),
        ("deep.jsonl:1: not a JSON object", folder / "deep.jsonl", folder / "out.jsonl"),
        ("holds no rows", write(folder / "empty.jsonl", []), folder / "out.jsonl"),
    ):
        result = run(given, "--out", out)
        said = " ".join(result.output.split())
        assert result.exit_code == 2 and words in said and "Traceback" not in said, said
    assert file.read_text() == text


def test_values_that_json_does_not_have_are_kept_and_resumed(folder: Path) -> None:
    """A Parquet row with a date and bytes; a JSON row with NaN, which equals nothing, and half a character."""
    good = row("</think>\\boxed{1}", "s", "math", '["1"]')
    table = pa.Table.from_pylist([{**good, "day": datetime.date(2024, 8, 1), "raw": b"\xff"}])
    pq.write_table(table, folder / "rows.parquet")
    odd = {**good, "score": float("nan"), "response": "</think>\\boxed{1\ud800}"}
    file = write(folder / "rows.jsonl", [good, odd])
    for given, statuses in ((folder / "rows.parquet", ["right"]), (file, ["right", "wrong"])):
        out = given.with_name(given.name + ".out")
        for _ in range(2):  # the second time there is nothing left to do
            result = run(given, "--out", out, "--explain")
            assert result.exit_code == 0, result.output
            assert [item["status"] for item in read(out)] == statuses
    assert read(folder / "rows.parquet.out")[0]["day"] == "2024-08-01"


def test_unusable_rows_are_all_named_or_get_the_status_error(folder: Path) -> None:
    """Every third row is bad, of five kinds; a good row's gold is checked once. Resumed from half, the same file."""
    good = row("</think>\\boxed{1}", "s", "math", '["1"]')
    bad = [
        (good | {"reward_model": {"ground_truth": '[" "]'}}, "ground truth cannot be used", "among the answers"),
        ({k: v for k, v in good.items() if k != "response"}, "no response", "field 'response': found None"),
        (good | {"ability": "chess"}, "no verifier for ability 'chess'", "expected one of: code, math"),
        ("{cut", "not a JSON object", "not a JSON object"),
        ([1], "not a JSON object", "expected a JSON object"),
    ]
    rows = [bad[n // 3 % 5][0] if n % 3 == 2 else good for n in range(90)]
    file, out = folder / "rows.jsonl", folder / "out.jsonl"
    file.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows))
    refused = run(file, "--out", out)
    said = refused.stderr.splitlines()
    assert refused.exit_code == 2 and not out.exists()
    assert said[0].startswith("or1-verify: error: 30 unusable rows (12 not a JSON object, 6 ")
    assert all(f"6 {reason}" in said[0] for _, reason, _ in bad[:3])
    for number, line in zip(range(3, 63, 3), said[1:21], strict=True):
        assert line.startswith(f"  {file}:{number}: ") and bad[(number // 3 - 1) % 5][2] in line
    listed = folder / "out.unusable_rows.jsonl"
    assert said[21:] == [
        f"  and 10 more; {listed} lists them",
        "Correct them, or leave them out with --unusable drop",
    ]
    assert [json.loads(line)["row"] for line in listed.read_text().splitlines()] == [
        f"{file}:{n}" for n in range(3, 91, 3)
    ]

    assert run(file, "--out", out, "--unusable", "drop").exit_code == 0
    rows_out = read(out)
    assert [item["status"] for item in rows_out] == ["error" if n % 3 == 2 else "right" for n in range(90)]
    for n, item in enumerate(rows_out):
        if n % 3 == 2:
            given, _, words = bad[n // 3 % 5]
            assert words in item["detail"] and item["reward"] == 0.0
            kept = {key: item[key] for key in item if key not in ("reward", "status", "detail")}
            assert kept == given if isinstance(given, dict) else set(kept) == {"not_json"}
    whole = out.read_text()
    out.write_text("".join(whole.splitlines(keepends=True)[:45]) + '{"torn')
    assert run(file, "--out", out, "--unusable", "drop", "--workers", 2).exit_code == 0
    assert out.read_text() == whole


def test_a_verifier_of_ones_own(folder: Path) -> None:
    """Its verdicts, and that what it does wrong costs its own sample alone."""
    config = VerifyConfig(custom={"parity": "my_verifiers:parity"}, timeout_s=120.0, lowest_reward=-1.0)
    verifier = build_verifiers(config, {"parity"})["parity"]
    problem = Problem("i", "s", "parity", (Message("user", "q"),), "even", {"m": 3}, "x.jsonl:1")
    try:
        verifier.check_ground_truth(problem)
        expected = {
            "even": ("right", ""),
            "neither": ("wrong", ""),
            "raise": ("error", "KeyError: 'mine'"),
            "odd": ("error", "x.jsonl:1: TypeError: returned '0.5', expected a number, a mapping"),
            "nan": ("error", "x.jsonl:1: ValueError: returned the reward nan, expected a finite number"),
            "low": ("error", "returned the reward -2, expected a finite number from verify.lowest_reward = -1 up"),
            "numpy": ("right", ""),
            "half": ("wrong", "{'acc': False}"),
            "die": ("error", "its process died"),
        }
        for response, (status, words) in expected.items():
            verdict = verifier.verify(problem, response, truncated=False)
            assert (verdict.status, words in verdict.detail) == (status, True), verdict
        assert verifier.verify(problem, "even", truncated=False).reward == 1.0
        assert verifier.verify(problem, "half", truncated=False).reward == 0.5
        cut = verifier.verify(problem, "even", truncated=True)
        assert (cut.status, cut.reward, verifier.verify(problem, "raise", False).reward) == ("truncated", -1.0, -1.0)
    finally:
        verifier.close()

    def of(name: str, **more: Any) -> CustomVerifier:
        return CustomVerifier("parity", VerifyConfig(custom={"parity": f"my_verifiers:{name}"}, **more))

    hasty, low = of("parity", timeout_s=0.5), of("parity", right_reward=0.5)
    verdict = hasty.verify(problem, "sleep", truncated=False)
    assert (low.verify(problem, "half", truncated=False).status, low.verify(problem, "odd", False).reward) == (
        "right",
        0,
    )
    hasty.close()
    low.close()
    assert verdict.status == "timeout" and "no answer within 0.5 s" in verdict.detail, verdict
    polite, boasting, verl = of("Polite"), of("Boasting"), of("as_verl")
    assert verl.verify(replace(problem, ground_truth='["7"]'), "a", truncated=False).reward == 1.0
    verl.close()
    assert polite.verify(problem, "any", truncated=False).detail == "because"
    with pytest.raises(ValueError, match="expected an x"):
        polite.check_ground_truth(problem)
    assert "'right' is from 1 up" in boasting.verify(problem, "any", truncated=False).detail
    polite.close()
    boasting.close()


def test_broken_verifiers_are_named(folder: Path) -> None:
    for path, words in {
        "my_verifiers:nothing": "no attribute 'nothing'",
        "nowhere.at_all:x": "No module named 'nowhere'",
        "my_verifiers:NUMBER": "is a int; expected a class with a method verify, or a function",
        "my_verifiers": "cannot be loaded: ValueError: expected package.module:name or path/to/file.py:name",
        "nowhere.py:judge": "No such file or directory: ",
        "my_verifiers:as_trl": "has the signature (completions, **kwargs); expected verify or a function of (problem,",
        "my_verifiers:swapped": "has the signature (response, problem, truncated); expected",
        "my_verifiers:lacking": "tokenizer); expected",
    }.items():
        with pytest.raises(VerifierBroken) as caught:
            build_verifiers(VerifyConfig(custom={"parity": path}), {"parity"})
        assert f"verify.custom.parity: '{path}'" in str(caught.value) and words in str(caught.value)


def test_a_reward_function_is_tried_on_the_first_twenty_rows(folder: Path) -> None:
    """By file, of any ability, with a name that the standard library has too; nothing is written."""
    (folder / "rewards").mkdir()
    (folder / "rewards" / "math.py").write_text(MINE)
    file = write(folder / "rows.jsonl", [row("half" if n else "raise", ability="chess") for n in range(25)])
    result = run(file, "--try", "rewards/math.py:parity")
    said = result.stdout.splitlines()
    assert result.exit_code == 0 and len(said) == 21 and "from 1 up (verify.right_reward)" in said[-1], result.output
    assert "rows.jsonl:1  error  0" in said[0] and "rows.jsonl:20  wrong  0.5  s" in said[19]
    assert run(file, "--try", "my_verifiers:as_trl").exit_code == 2
    assert not list(folder.glob("*.out"))
    assert "--out is missing" in run(file).output
