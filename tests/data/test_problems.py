"""Loading of problem files, and their unusable rows: which, on which line, counted by which reason, in one pass.

Rows are written by hand in the published schema; what is not tested is the real data set itself, which is not on this
machine. More of what makes a row unusable is in test_published and verify/; the commands are tried in
train/test_unusable_rows, test_pipeline, evaluate/test_eval_command and verify/test_verify_command.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows_as_published import skywork as row

from or1_megatron.data.problems import check_ground_truths, filter_by_difficulty, load_problems
from or1_verify.math.verifier import MathVerifier
from or1_verify.problems.rows import DataError, RowError
from or1_verify.problems.unusable import UnusableRows


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows))
    return path


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    with closing(MathVerifier(timeout_s=60)) as made:
        yield made


def test_a_skywork_row_becomes_a_problem(tmp_path: Path) -> None:
    """Every field, and the id against an independent computation of its definition."""
    (problem,) = load_problems(write(tmp_path, row()))
    text = json.dumps(["train-math-numinamath1.5_olympiads", [["user", "What is 1+1?"]]])
    assert problem.id == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (problem.source, problem.ability, problem.ground_truth) == (
        "train-math-numinamath1.5_olympiads",
        "math",
        '["2"]',
    )
    assert [(message.role, message.content) for message in problem.messages] == [("user", "What is 1+1?")]
    assert dict(problem.difficulty) == {"M-7B": 5, "M-32B": 16}
    assert problem.origin == f"{tmp_path / 'train.jsonl'}:1"


def test_golds_of_the_released_evaluation_files(tmp_path: Path, verifier: MathVerifier) -> None:
    """A parquet with the columns of Skywork-OR1's or1_data/eval/aime24.parquet and aime25.parquet, whose golds are one
    answer as it is: the verifier takes 25 for 025. It does not prove that an interval is read as one."""
    golds = {"204": "204", "025": "25", "336^\\circ": "336^\\circ", "-1.5": "-1.5", '"x+1"': "1+x", '["7", "8"]': "8"}
    rows = [
        row(str(n), data_source="test-math-aime24", extra_info={"index": n, "split": "test"},
            reward_model={"ground_truth": gold, "style": "rule"})
        for n, gold in enumerate(golds)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "aime24.parquet")
    problems = load_problems(tmp_path / "aime24.parquet")
    golds_read = [json.loads(problem.ground_truth)[0] for problem in problems]
    assert golds_read[:5] == ["204", "025", "336^\\circ", "-1.5", "x+1"]
    unusable = UnusableRows()
    assert check_ground_truths(problems, {"math": verifier}, unusable) == problems and not len(unusable)
    for problem, answer in zip(problems, golds.values(), strict=True):
        for said, status in ((answer, "right"), ("1/3", "wrong")):
            verdict = verifier.verify(problem, f"</think>\\boxed{{{said}}}", truncated=False)
            assert verdict.status == status, (problem.ground_truth, said, verdict)


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in row("bad").items() if name != key}


BAD_ROWS = {
    "not json": ('{"data_source": ', ["not a JSON object"]),
    "a list": ("[1]", ["expected a JSON object", "[1]"]),
    "no prompt": (without("prompt"), ["no known layout", "columns: {prompt: question}"]),
    "no reward model": (without("reward_model"), ["no known layout", "expected prompt and answer"]),
    "empty prompt": (row(prompt=[]), ["'prompt'", "at least 1", "[]"]),
    "prompt is blank text": (row(prompt=" "), ["'prompt.0.content'", "white space", "' ' (str)"]),
    "role is a number": (row(prompt=[{"role": 1, "content": "x"}]), ["'prompt.0.role'", "string", "1 (int)"]),
    "gold is null": (row(reward_model={"ground_truth": None}), ["'reward_model.ground_truth'", "string", "None"]),
    "difficulty is text": (
        row(extra_info={"index": 0, "model_difficulty": {"M": "5"}}),
        ["'extra_info.model_difficulty.M'", "integer", "'5' (str)"],
    ),
    "difficulty is 17": (
        row(extra_info={"index": 0, "model_difficulty": {"M": 17}}),
        ["'extra_info.model_difficulty.M'", "less than or equal to 16", "17 (int)"],
    ),
    "plain: no prompt": ({"answer": "2"}, ["['answer'] are of no known layout"]),
    "plain: answer null": ({"prompt": "q", "answer": None}, ["'answer", "None"]),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused_by_file_line_and_field(tmp_path: Path, case: str) -> None:
    bad, words = BAD_ROWS[case]
    path = write(tmp_path, row("good"), bad)
    with pytest.raises(DataError) as caught:
        load_problems(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    for word in words:
        assert word in message, message


def test_golds_without_text_and_unknown_abilities_are_refused_by_row(tmp_path: Path, verifier: MathVerifier) -> None:
    bad = row("bad", reward_model={"ground_truth": json.dumps(["1", " "]), "style": "rule"})
    worse = [
        row(gold, data_source="other", reward_model={"ground_truth": gold}) for gold in ('["2', "nan", "null", "{}")
    ]
    problems = load_problems(write(tmp_path, row(), bad, row(ability="cooking", data_source="other"), *worse))
    unusable = UnusableRows()
    assert check_ground_truths(problems, {"math": verifier}, unusable) == problems[:1]
    with pytest.raises(DataError) as caught:
        unusable.refuse()
    first, second, third, *others = str(caught.value).splitlines()
    assert first.startswith("6 unusable rows")
    assert len(others) == 4 and all("expected a JSON list" in line for line in others)
    assert re.search(r"train\.jsonl:2: field 'ground_truth': expected a JSON list .*found ' ' among", second)
    assert re.search(r"train\.jsonl:3: field 'ability': found 'cooking', expected one of: math", third)


def test_copies_are_folded_and_two_answers_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problems = load_problems(write(tmp_path, row("a"), row("b"), row("a"), row("a")))
    assert [problem.origin.rpartition(":")[2] for problem in problems] == ["1", "2"]
    assert "2 of 4 rows are copies of earlier ones and were folded" in caplog.text
    other = row("a", reward_model={"ground_truth": '["another"]', "style": "rule"})
    with pytest.raises(DataError, match=r"train\.jsonl:3: the same problem as .*train\.jsonl:1.*another"):
        load_problems(write(tmp_path, row("a"), row("b"), other))


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no problems"):
        load_problems(write(tmp_path))
    with pytest.raises(DataError, match="no such file"):
        load_problems(tmp_path / "absent.jsonl")
    (tmp_path / "data.csv").write_text("x")
    with pytest.raises(DataError, match=r"'\.csv'; expected \.jsonl, \.json"):
        load_problems(tmp_path / "data.csv")
    (tmp_path / "data.parquet").write_text("x")
    with pytest.raises(DataError, match="not a readable parquet file"):
        load_problems(tmp_path / "data.parquet")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n', encoding="utf-16")
    with pytest.raises(DataError, match=r"data\.jsonl: its text is UTF-16; expected UTF-8"):
        load_problems(tmp_path / "data.jsonl")


def test_difficulty_filter(tmp_path: Path) -> None:
    """Failures 0 and 16 go, 1 and 15 stay."""
    rows = [row(str(n), extra_info={"index": n, "model_difficulty": {"M": n}}) for n in (0, 1, 15, 16)]
    problems = load_problems(write(tmp_path, *rows))
    unusable = UnusableRows()
    assert [problem.difficulty["M"] for problem in filter_by_difficulty(problems, "M", unusable)] == [1, 15]
    with pytest.raises(DataError, match="leaves none of 1"):
        filter_by_difficulty(problems[:1], "M", unusable)
    assert not unusable and filter_by_difficulty(problems, "N", unusable) == []
    with pytest.raises(DataError, match=r"4 no model_difficulty of 'N'(.|\n)*:1: .*no entry for 'N' \(measured: M\)"):
        unusable.refuse()


NOT_JSON = '{"prompt": "q'


def test_a_file_of_nothing_but_bad_rows_is_named_as_such(tmp_path: Path) -> None:
    """One row: its message alone; a million would not be held in memory, and are counted still."""
    path = tmp_path / "train.jsonl"
    path.write_text(NOT_JSON + "\n")
    with pytest.raises(DataError) as caught:
        load_problems(path)
    assert str(caught.value).startswith(f"{path}:1: not a JSON object") and "\n" not in str(caught.value)
    unusable = UnusableRows()
    for line in range(30_000):
        unusable.add(RowError(f"x.jsonl:{line}", "not a JSON object", "x"))
    with pytest.raises(DataError, match=r"30000 unusable rows(.|\n)*29980 more; .*d.jsonl lists the first 10000"):
        unusable.refuse(tmp_path / "listed.jsonl")
    assert len((tmp_path / "listed.jsonl").read_text().splitlines()) == 10_000
