"""Problem files as they are published for RL, and as other programs write them: small copies of their first rows.

The columns are those of the sets' pages on the hub in 2026. Not proven here: that every row of a set can be used.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from or1_megatron.config.schema import SourceConfig
from or1_megatron.data.problems import load_problems
from or1_megatron.sizing.dry_run import _count_rows
from or1_verify.code.ground_truth import parse_code_tests
from or1_verify.problems.layouts import detect_layout, read_published
from or1_verify.problems.rows import DataError
from or1_verify.problems.unusable import UnusableRows

ASKED = [{"role": "user", "content": "What is 3 + 4?"}]
VERL = {"prompt": ASKED, "reward_model": {"ground_truth": "7", "style": "rule-lighteval/MATH_v2"}}
CASES = [{"input": "3 4\n", "output": "7\n", "type": "stdin_stdout", "fn_name": None}]
KODCODE_TEST = "from solution import add\n\n" + "".join(
    f"def test_{n}():\n    assert add({n}, 4) == {n + 4}\n" for n in (0, 3)
)

MATH: dict[str, tuple[str, dict[str, Any]]] = {
    "DAPO-Math-17k": ("skywork", {**VERL, "data_source": "math_dapo", "ability": "MATH",
                                  "extra_info": {"index": "9a"}}),
    "DeepScaleR of verl": ("skywork", {**VERL, "data_source": "", "ability": "math", "extra_info": {"split": "train"}}),
    "GSM8K of verl": ("skywork", {**VERL, "data_source": "openai/gsm8k", "ability": "math"}),
    "slime": ("plain", {"prompt": ASKED, "label": "7"}),
    "label": ("plain", {"prompt": "What is 3 + 4?", "label": "7", "metadata": {"rm_type": "math"}}),
    "Big-Math": ("deepscaler", {"problem": "What is 3 + 4?", "answer": "7", "source": "orca_math",
                                "domain": ["Algebra"], "llama8b_solve_rate": 0.5}),
    "DeepMath-103K": ("deepmath", {"question": "What is 3 + 4?", "final_answer": "7", "difficulty": 4.5, "topic": "x",
                                   "r1_solution_1": "s", "r1_solution_2": "s", "r1_solution_3": "s"}),
    "OpenMathReasoning": ("openmath", {"problem": "What is 3 + 4?", "expected_answer": "7", "problem_type":
                                       "has_answer_extracted", "problem_source": "aops", "generated_solution": "s"}),
    "INTELLECT-2": ("intellect2", {"problem_id": "p", "task_type": "verifiable_math", "prompt": "What is 3 + 4?",
                                   "verification_info": '{"ground_truth": "$7$"}', "metadata": "{}"}),
    "AReaL": ("areal", {"prompt": "What is 3 + 4?", "solutions": ["\\boxed{7}"], "task": "math", "query_id": "q"}),
    "RLVR": ("rlvr", {"messages": ASKED, "ground_truth": "7", "dataset": "gsm8k", "constraint_type": None}),
}  # fmt: skip
CODE: dict[str, tuple[str, dict[str, Any], int]] = {
    "INTELLECT-2": ("intellect2", {"task_type": "verifiable_code", "prompt": "Add.", "verification_info":
                                   json.dumps({"language": "python", "test_cases": CASES})}, 1),
    "DeepCoder of PrimeIntellect": ("deepcoder", {"problem": "Add.", "tests": json.dumps(CASES)}, 1),
    "DeepCoder of TACO": ("deepcoder", {"problem": "Add.", "tests": '{"inputs": ["3 4"], "outputs": ["7"]}'}, 1),
    "DeepCoder of LiveCodeBench": (
        "deepcoder", {"problem": "Add.", "starter_code": "class Solution: ...", "metadata": {"func_name": "add"},
                      "tests": '[{"input": "3\\n4", "output": "7", "testtype": "functional"}]'}, 1),
    "KodCode": ("kodcode", {"question": "Add.", "solution": "def add(a, b): return a + b", "subset": "Prefill",
                            "test": KODCODE_TEST, "test_info": [{"function_name": "add", "function_declaration":
                                                                 "def add(a, b):", "parameter_list": "(a, b)"}]}, 1),
    "KodCode without test_info": ("kodcode", {"question": "Add.", "solution": "def add(a, b): return a + b",
                                              "test": "from solution import add\n" + KODCODE_TEST}, 1),
    "AceCode": ("acecode", {"id": "a", "question": "Add.", "test_cases": ["assert add(3, 4) == 7"],
                            "inferences": []}, 1),
    "code_contests": ("code_contests", {"description": "Add.", "public_tests": {"input": ["3 4"], "output": ["7"]},
                                        "private_tests": {"input": [], "output": []},
                                        "generated_tests": {"input": ["1 1"], "output": ["2"]}}, 2),
    "code-r1, functions": ("skywork", {"prompt": ASKED, "data_source": "code", "ability": "code",
                                       "reward_model": {"ground_truth": json.dumps({"functional":
        "def check(candidate):\n    assert candidate(3, 4) == 7\n\n\ncheck(add)"})}}, 1),
    "code-r1, programs": ("skywork", {"prompt": ASKED, "data_source": "code", "ability": "code", "reward_model":
                                      {"ground_truth": '{"inputs": ["3 4"], "outputs": ["7"]}'}}, 1),
}  # fmt: skip


def write(folder: Path, rows: list[Mapping[str, Any]], name: str = "rows.parquet") -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", MATH)
def test_math_as_published(name: str, tmp_path: Path) -> None:
    layout, row = MATH[name]
    assert detect_layout(row) == layout
    (problem,) = load_problems(write(tmp_path, [row]))
    assert (problem.ability, json.loads(problem.ground_truth)) == ("math", ["7"])
    assert [message.content for message in problem.messages] == ["What is 3 + 4?"]
    assert json.loads(read_published(row, "auto", "f:1").ground_truth) == ["7"]  # as or1 data build reads it


@pytest.mark.parametrize("name", CODE)
def test_code_as_published(name: str, tmp_path: Path) -> None:
    layout, row, count = CODE[name]
    assert detect_layout(row) == layout
    (problem,) = load_problems(write(tmp_path, [row]))
    assert problem.ability == "code"
    assert len(parse_code_tests(problem.ground_truth).tests) == count


def test_a_task_without_a_verifier_is_named(tmp_path: Path) -> None:
    rows = [{**MATH["INTELLECT-2"][1], "task_type": "llm_judgeable_groundtruth_similarity"}]
    with pytest.raises(DataError, match=r"task_type.*expected math or code"):
        load_problems(write(tmp_path, rows))
    rows = [{**MATH["RLVR"][1], "dataset": "ifeval"}]
    with pytest.raises(DataError, match="'ifeval', which has no verifier"):
        load_problems(write(tmp_path, rows))


@pytest.mark.parametrize(
    "name", ["rows.json", "list.json", "list.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "saved", "splits"]
)
def test_files_of_other_programs(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": "What is 3 + 4?", "label": "7"}, {"prompt": "What is 3 + 5?", "label": "8"}]
    lines, path = "".join(json.dumps(row) + "\n" for row in rows).encode(), tmp_path / name
    match name:
        case "rows.json":
            path.write_bytes(lines)
        case "list.json" | "list.jsonl":
            path.write_text(json.dumps(rows))
        case "rows.jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "rows.jsonl.zst":
            path.write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
        case "saved":
            datasets.Dataset.from_list(rows).save_to_disk(path)
        case "splits":
            datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(path)
    problems = load_problems(path)
    assert _count_rows(path, None, "data.train") == 2
    assert [json.loads(problem.ground_truth) for problem in problems] == [["7"], ["8"]]
    if name != "splits":
        assert {problem.source for problem in problems} == {name.split(".")[0]}


def test_columns_by_name(tmp_path: Path) -> None:
    """Also of a column inside another, and an ability for all rows. Domain is no sign of another layout."""
    row = {"question": "What is 3 + 4?", "extra": {"gold": 7.0}, "domain": "x", "problem": "no"}
    columns = {"prompt": "question", "answer": "extra.gold", "ability": "math"}
    path = write(tmp_path, [row])
    (problem,) = load_problems(path, columns=columns)
    assert (problem.messages[0].content, problem.ground_truth) == ("What is 3 + 4?", '["7"]')
    with pytest.raises(DataError, match=r"rows.parquet:1: no column 'gold', which columns.answer names; this row has"):
        load_problems(path, columns={"prompt": "question", "answer": "gold"})
    assert SourceConfig(path=path, columns=columns).columns == columns  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected prompt and answer among them"):
        SourceConfig(path=path, columns={"prompt": "question"})


def test_numbers_as_pandas_writes_them(tmp_path: Path) -> None:
    rows = [
        {**VERL, "data_source": "s", "ability": "math",
         "extra_info": {"model_difficulty": {"7B": 3.0, "32B": math.nan}}}
    ]  # fmt: skip
    (problem,) = load_problems(write(tmp_path, rows))
    assert problem.difficulty == {"7B": 3}
    (whole,) = load_problems(write(tmp_path, [{"prompt": "2+2?", "answer": 4.0}]))
    assert whole.ground_truth == '["4"]'


UNUSABLE: dict[str, Any] = {
    "NaN": {"prompt": "q", "answer": math.nan},
    "infinite": {"prompt": "q", "answer": math.inf},
    "nan in words": {"prompt": "q", "answer": "nan"},
    "None in words": {"prompt": "q", "label": "None"},
    "null": {"prompt": "q", "answer": None},
    "a blank prompt": {"prompt": "  \n", "answer": "7"},
    "blank messages": {"prompt": [{"role": "user", "content": " "}], "answer": "7"},
    "a picture": {"prompt": "q", "answer": "7", "images": [{"bytes": "x"}]},
    "a picture's path": {"problem": "q", "answer": "7", "image": "a.png"},
    "another layout's NaN": {"problem": "q", "answer": math.nan},
    "verl's nan": {**VERL, "ability": "math", "reward_model": {"ground_truth": "nan"}},
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_problem_is_unusable(kind: str, tmp_path: Path) -> None:
    unusable = UnusableRows()
    problems = load_problems(write(tmp_path, [UNUSABLE[kind]]), unusable=unusable)
    assert not problems and len(unusable) == 1


def test_a_column_of_pictures_without_one_is_no_fault(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "answer": "7", "image": value} for number, value in enumerate((0, None))]
    assert len(load_problems(write(tmp_path, rows))) == 2
