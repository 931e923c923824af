"""Unusable rows are found in one pass: which, on which line, counted by which reason. What makes a row unusable is in
test_problems, test_sources and verify/; the commands are tried in train/test_unusable_rows, test_pipeline,
evaluate/test_eval_command and verify/test_verify_command."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from or1_megatron.data.problems import check_ground_truths, load_problems
from or1_verify.math.verifier import MathVerifier
from or1_verify.problems.rows import DataError, RowError
from or1_verify.problems.unusable import UnusableRows

GOOD = {"prompt": "What is 1+1, number %d?", "answer": "2"}
BAD_GOLD = {"prompt": "What is it, number %d?", "answer": " "}
NOT_JSON, NO_ANSWER, TWICE = '{"prompt": "q', {"prompt": "Number %d."}, {"prompt": "Again?", "answer": "1"}
REASONS = {
    "bad gold": "ground truth cannot be used",
    "not json": "not a JSON object",
    "no answer": "columns of no known layout",
    "twice": "the same problem as an earlier row, with another answer",
}


def mixed_rows() -> tuple[list[str], dict[int, str]]:
    """Lines of a file, the first one blank, and the fault of each bad one by its number: 60 golds, 9 others."""
    kinds = ["bad gold"] * 60 + ["not json"] * 3 + ["no answer"] * 3 + ["twice"] * 3 + ["good"] * 30
    lines, faults = [""], dict[int, str]()
    lines.append(json.dumps(TWICE))
    for place in range(len(kinds)):
        kind = kinds[place * 37 % len(kinds)]  # 37 and 99 share no divisor: each once, in mixed order
        row: Any = {"bad gold": BAD_GOLD, "no answer": NO_ANSWER, "twice": {**TWICE, "answer": "2"}, "good": GOOD}.get(
            kind
        )
        if row is not None:
            row = {**row, "prompt": row["prompt"].replace("%d", str(place))}
        lines.append(NOT_JSON if row is None else json.dumps(row))
        if kind != "good":
            faults[len(lines)] = kind
    return lines, faults


def read(path: Path) -> tuple[int, UnusableRows]:
    """How many problems of a file are usable, and its unusable rows."""
    unusable = UnusableRows()
    verifier = MathVerifier(timeout_s=60)
    try:
        problems = load_problems(path, None, unusable)
        return len(check_ground_truths(problems, {"math": verifier}, unusable)), unusable
    finally:
        verifier.close()


def test_all_of_a_file_are_found_in_one_pass_each_on_its_line(tmp_path: Path) -> None:
    lines, faults = mixed_rows()
    path, listed = tmp_path / "train.jsonl", tmp_path / "run" / "unusable_rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    usable, unusable = read(path)
    assert usable == 31 and len(unusable) == len(faults) == 69
    with pytest.raises(DataError) as caught:
        unusable.settle("refuse", listed, "data.unusable=drop")
    said = str(caught.value).splitlines()
    counts = Counter(REASONS[kind] for kind in faults.values())
    assert said[0] == "69 unusable rows (" + ", ".join(f"{n} {reason}" for reason, n in counts.most_common()) + "):"
    places = [int(re.match(rf"  {re.escape(str(path))}:(\d+): ", line)[1]) for line in said[1:21]]  # type: ignore[index]
    assert places == sorted(faults)[:20]
    assert said[21:] == [
        f"  and 49 more; {listed} lists them",
        "Correct them, or leave them out with data.unusable=drop",
    ]
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    assert {int(row["row"].rsplit(":", 1)[1]): row["reason"] for row in rows} == {
        line: REASONS[kind] for line, kind in faults.items()
    }
    assert all(row["message"].startswith(row["row"] + ": ") for row in rows)


def test_rows_that_are_left_out_are_counted_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unusable = UnusableRows()
    unusable.settle("drop", tmp_path / "none.jsonl", "x")
    assert not caplog.records and not (tmp_path / "none.jsonl").exists()
    for line in (10, 9):
        unusable.add(RowError(f"b.jsonl:{line}", "not a JSON object", "x"))
    unusable.add(RowError("a.jsonl:11", "no date", "y"))
    with caplog.at_level(logging.WARNING):
        unusable.settle("drop", tmp_path / "listed.jsonl", "data.unusable=drop")
    expected = "data.unusable=drop: 3 unusable rows (2 not a JSON object, 1 no date) left out;"
    assert caplog.messages == [f"{expected} {tmp_path / 'listed.jsonl'} lists them"]
    rows = [json.loads(line)["row"] for line in (tmp_path / "listed.jsonl").read_text().splitlines()]
    assert rows == ["a.jsonl:11", "b.jsonl:9", "b.jsonl:10"]


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
