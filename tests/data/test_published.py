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
    "DAPO-Math-17k-Processed": ("skywork", {**VERL, "prompt": "What is 3 + 4?", "solution": "7", "ability": "MATH"}),
    "a number as gold": ("skywork", {**VERL, "ability": "math", "reward_model": {"ground_truth": 7.0}}),
    "a list as gold": ("skywork", {**VERL, "ability": "math", "reward_model": {"ground_truth": ["7"]}}),
    "Dolci": ("rlvr", {"messages": ASKED, "ground_truth": ["7"], "dataset": ["math"]}),
    "ORZ": ("orz", {"0": {"from": "human", "value": "What is 3 + 4?"},
                    "1": {"from": "assistant", "ground_truth": {"value": "7"}}}),
    "MegaScience": ("still3", {"question": "What is 3 + 4?", "answer": "We add.", "reference_answer": "7"}),
    "choices beside an answer": ("deepscaler", {"problem": "What is 3 + 4?", "answer": "7",
                                                "choices": {"A": "6", "B": "7"}}),
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
    for name in ("ifeval", "code", "general-quality_ref"):
        with pytest.raises(DataError, match=f"'{name}' .*which has no verifier"):
            load_problems(write(tmp_path, [{**MATH["RLVR"][1], "dataset": name}]))
    info = json.dumps({"language": "rust", "test_cases": CASES})
    with pytest.raises(DataError, match="language rust, expected python"):
        load_problems(write(tmp_path, [{**CODE["INTELLECT-2"][1], "verification_info": info}]))


@pytest.mark.parametrize(
    "name",
    ["rows.json", "marked.jsonl", "list.json", "list.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "saved", "splits"],
)
def test_files_of_other_programs(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": "What is 3 + 4?", "label": "7"}, {"prompt": "What is 3 + 5?", "label": "8"}]
    lines, path = "".join(json.dumps(row) + "\n" for row in rows).encode(), tmp_path / name
    match name:
        case "rows.json":
            path.write_bytes(lines)
        case "marked.jsonl":
            path.write_bytes(b"\xef\xbb\xbf" + lines)
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


def test_a_list_of_lists_and_a_context(tmp_path: Path) -> None:
    """ORZ's file is a JSON list of pairs of turns; OlympiadBench's physics has what is given in ``context``."""
    (tmp_path / "orz.json").write_text(json.dumps([list(MATH["ORZ"][1].values())]))
    (problem,) = load_problems(tmp_path / "orz.json")
    assert (problem.messages[0].content, problem.ground_truth) == ("What is 3 + 4?", '["7"]')
    row = {"question": "Find v.", "final_answer": ["7"], "context": "A ball falls.", "subfield": "Mechanics"}
    assert load_problems(write(tmp_path, [row]))[0].messages[0].content == "A ball falls.\nFind v."


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
    "a numbered picture": {"question": "q", "final_answer": ["7"], "image_1": {"bytes": "x"}},
    "a picture of TACO": {"question": "q", "input_output": '{"inputs": ["1"], "outputs": ["1"]}', "picture_num": "1"},
    "a letter without choices": {"question": "q", "answer": "B", "options": ["6", "7"]},
    "a number of a choice": {"question": "q", "answer": 1, "choices": ["6", "7"]},
    "a proof": {"problem": "Prove it.", "answer": "proof", "question_type": "proof"},
    "a system's message": {"messages": [{"role": "system", "content": "s"}, *ASKED], "ground_truth": "7"},
    "input from a file": {
        "description": "q",
        "public_tests": {"input": ["1"], "output": ["1"]},
        "private_tests": None,
        "generated_tests": None,
        "input_file": "input.txt",
    },
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_problem_is_unusable(kind: str, tmp_path: Path) -> None:
    unusable = UnusableRows()
    problems = load_problems(write(tmp_path, [UNUSABLE[kind]]), unusable=unusable)
    assert not problems and len(unusable) == 1


def test_a_column_of_pictures_without_one_is_no_fault(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}?", "answer": "7", "image": value} for number, value in enumerate((0, None))]
    assert len(load_problems(write(tmp_path, rows))) == 2
