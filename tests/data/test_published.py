"""Problem files and folders as published, and as other programs write them: small copies of their first rows.

The columns are those of the sets' pages on the hub in 2026. Sets on the hub are in test_hub. Not proven here: that
every row of a set can be used.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows_as_published import livecodebench, skywork

from or1_megatron.config.schema import SourceConfig
from or1_megatron.data.problems import check_ground_truths, is_hub_id, load_problems
from or1_megatron.sizing.run_plan import _count_rows
from or1_verify.code.ground_truth import parse_code_tests
from or1_verify.code.verifier import CodeVerifier
from or1_verify.config import VerifyConfig
from or1_verify.problems.layouts import detect_layout, read_published
from or1_verify.problems.rows import DataError
from or1_verify.problems.unusable import UnusableRows
from or1_verify.types import Message, Problem

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


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder laid out as Skywork-OR1-RL-Data: data/SPLIT-NNNNN-of-NNNNN.parquet."""
    (tmp_path / "data").mkdir()
    for name, contents in {"math-00000-of-00002": "ab", "math-00001-of-00002": "c", "code-00000-of-00001": "d"}.items():
        write(tmp_path / "data", [skywork(f"problem {content}") for content in contents], f"{name}.parquet")
    return tmp_path


def contents(problems: list[Problem]) -> list[str]:
    return [problem.messages[0].content[-1] for problem in problems]


def test_a_folder_is_read_by_split(published: Path) -> None:
    assert contents(load_problems(published, split="math")) == ["a", "b", "c"]
    assert contents(load_problems(published)) == ["d", "a", "b", "c"]
    with pytest.raises(DataError, match=r"no file of split 'train'; expected train\.jsonl.*code-00000"):
        load_problems(published, split="train")
    (published / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no file of problems \(\.jsonl"):
        load_problems(published / "empty")


def test_a_hub_id_is_not_a_path(tmp_path: Path) -> None:
    """What sets on the hub give, and what is said of those that cannot be reached: test_hub."""
    assert is_hub_id(Path("Skywork/Skywork-OR1-RL-Data"))
    assert not is_hub_id(Path("data/train.jsonl")) and not is_hub_id(tmp_path)


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_livecodebench_rows_become_problems_with_all_tests(tmp_path: Path) -> None:
    hidden = json.dumps([{"input": "5\n", "output": "10\n", "testtype": "stdin"}])
    call = {"input": "3", "output": "6", "testtype": "functional"}
    rows = [
        livecodebench(private_test_cases=packed(hidden)),
        livecodebench("Complete it.", starter_code="class Solution:\n    def twice(self, n):",
                      public_test_cases=json.dumps([call]), metadata=json.dumps({"func_name": "twice"})),
    ]  # fmt: skip
    stdin, function = load_problems(write(tmp_path, rows, "lcb.jsonl"))
    first, second = parse_code_tests(stdin.ground_truth).tests
    assert (first.stdin, first.expected, second.stdin, second.expected) == (b"1\n", "2\n", b"5\n", "10\n")
    assert (stdin.ability, stdin.source) == ("code", "lcb_atcoder")
    (only,) = parse_code_tests(function.ground_truth).tests
    assert (only.function, only.arguments, only.expected) == ("twice", [3], 6)
    assert "def twice(self, n):" in function.messages[0].content


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/should/never/be/called"),))


@pytest.mark.parametrize(
    "bad", [packed(Evil()), "no base64 !", base64.b64encode(b"no zlib").decode(), "[1]", '{"a": 1}']
)
def test_bad_test_cases_are_named_and_nothing_in_them_is_executed(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n" * 3 + json.dumps(livecodebench(private_test_cases=bad)) + "\n")
    unusable = UnusableRows()
    check_ground_truths(load_problems(path), {"code": Reading()}, unusable)
    with pytest.raises(DataError, match=r"x\.jsonl:4: field 'ground_truth': private_test_cases"):
        unusable.refuse()


class Reading:
    """The code verifier's reading of a ground truth, without its sandbox."""

    def check_ground_truth(self, problem: Problem) -> None:
        parse_code_tests(problem.ground_truth)


def test_livecodebench_prompts_are_its_own_to_the_character() -> None:
    """SHA-256 of what LiveCodeBench 28fef95's get_deepseek_r1_question_template_answer returns for these two questions,
    without the chat template's mark of the assistant's turn at the end."""
    for content, starter, digest in (
        ("Double it.\n\nSample:\n1\n", "", "e7e5c49d500b7b08"),
        ("Complete it.", "class Solution:\n    def twice(self, n: int) -> int:\n        ", "62ced0c721884488"),
    ):
        read = read_published(livecodebench(content, starter_code=starter), "auto", "f:1")
        assert hashlib.sha256(read.content.encode()).hexdigest()[:16] == digest
        assert read.statement == content  # what duplicates are found by


HUMANEVAL = {
    "task_id": "HumanEval/x", "entry_point": "third", "canonical_solution": "    return sorted(xs)[:3]\n",
    "prompt": 'from typing import List\n\n\ndef third(xs: List[int]) -> List[int]:\n    """ The three smallest. """\n',
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n"
            "    assert tuple(candidate([3, 1, 2])) == tuple(third([1, 3, 2]))\n"
            "    assert candidate([4, 9, 4, 5]) == [4, 4, 5]\n",
}  # fmt: skip
MBPP = {
    "task_id": 11, "text": "Write a function to add.", "code": "def add(a, b):\n    return a + b",
    "test_setup_code": "three = 3",
    "test_list": ["assert add(1, 2) == three", "assert add(0, -1) == -1"], "challenge_test_list": [],
}  # fmt: skip
SANITIZED = {
    "source_file": "f", "task_id": 7, "prompt": "Write a function to find the square root.",
    "code": "import math\ndef root(n):\n    return math.sqrt(n)", "test_imports": ["from math import isclose"],
    "test_list": ["assert isclose(root(2), 2**0.5)"],
}  # fmt: skip
PLUS = {
    **SANITIZED, "code": "def add(a, b):\n    return a + b", "test_list": ["assert add(1, 2) == 3"],
    "test": "import numpy as np\n\ndef assertion(out, exp, atol):\n    assert out == exp\n\ninputs = [[1, 2], [4, 5]]\n"
            "results = [3, 9]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n"
            "    assertion(add(*inp), exp, 0)\n",
}  # fmt: skip


def test_code_benchmarks_are_judged_by_their_own_tests() -> None:
    """Rows with the columns of openai_humaneval, mbpp, full and sanitized, and mbppplus, which has more tests than it
    shows: their solutions pass in the sandbox, and others fail. It does not prove that every published row can be
    used."""
    verifier = CodeVerifier(VerifyConfig(timeout_s=60))
    try:
        for row, wrong in (
            (HUMANEVAL, "def third(xs):\n    return xs[:3]"),
            (MBPP, "def add(a, b):\n    return a - b"),
            (SANITIZED, "def root(n):\n    return n"),
            (PLUS, "def add(a, b):\n    return 3"),
        ):
            read = read_published(row, "auto", "f:1")
            message = Message("user", read.content)
            problem = Problem("p", "s", read.ability, (message,), read.ground_truth, {}, "f:1")
            for program, status in ((read.solutions[0], "right"), (wrong, "wrong")):
                verdict = verifier.verify(problem, f"</think>\n```python\n{program}\n```", truncated=False)
                assert verdict.status == status, (row["task_id"], verdict)
    finally:
        verifier.close()
    asked = read_published(MBPP, "auto", "f:1").content
    assert "Write a function to add. Your code should pass these tests:\n\nassert add(1, 2) == three\nassert" in asked
    assert "```python\nfrom typing import List" in read_published(HUMANEVAL, "auto", "f:1").content


def test_math_benchmarks_in_their_published_columns() -> None:
    """MATH-500, amc23 (a float), minervamath, OlympiadBench (a list between dollars), GSM8K (after ####), and MATH as
    first published (in a box; without one there is no answer)."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"problem": "p", "solution": "s", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 2,
          "unique_id": "u"}, "\\frac{1}{2}"),
        ({"id": 0, "question": "p", "answer": 27.0, "url": "u"}, "27"),
        ({"question": "p", "answer": "4.5e33"}, "4.5e33"),
        ({"id": 1606, "question": "p", "solution": ["s"], "final_answer": ["$\\frac{1}{2}$"], "context": None,
          "is_multiple_answer": False, "unit": None, "answer_type": "Numerical", "subfield": "Algebra"},
         "\\frac{1}{2}"),
        ({"question": "p", "solution": ["s"], "final_answer": ["$3$", "$5$"]}, "3, 5"),
        ({"question": "p", "answer": "18 - 2 = <<18-2=16>>16.\n#### 1,216"}, "1216"),
        ({"problem": "p", "level": "Level 5", "type": "Algebra", "solution": "It is \\boxed{\\frac{1}{2}}."},
         "\\frac{1}{2}"),
    ]  # fmt: skip
    for row, gold in rows:
        read = read_published(row, "auto", "f:1")
        assert (read.statement, read.ability, json.loads(read.ground_truth)) == ("p", "math", [gold])
    assert read_published({"problem": "p", "solution": "1"}, "auto", "f:1").ground_truth == ""
    with pytest.raises(DataError, match=r"column 'final_answer': found '5' \(str\), expected a list of texts"):
        read_published({"question": "p", "final_answer": "5"}, "auto", "f:1")


PUBLISHED: dict[str, dict[str, Any]] = {
    "numinamath": {"problem": "p", "solution": "s", "answer": "1", "question_type": "MCQ", "source": "olympiads"},
    "deepscaler": {"problem": "p", "answer": "1", "solution": "s"},
    "still3": {"question": "p", "answer": "1"},
    "omni_math": {"problem": "p", "answer": "1", "solution": "s", "domain": ["x"], "source": "usamo"},
    "math": {"problem": "p", "solution": "s", "level": "Level 1", "type": "Algebra"},
    "taco": {"question": "p", "solutions": '["s"]', "input_output": '{"inputs": [], "outputs": []}',
             "starter_code": "", "difficulty": "HARD"},
    "leetcode": {"problem_description": "p", "starter_code": "class S:", "prompt": "import math", "completion": "s",
                 "entry_point": "S().f", "test": "def check(candidate): ...", "difficulty": "Hard", "task_id": "f"},
}  # fmt: skip


@pytest.mark.parametrize("layout", PUBLISHED)
def test_layouts_are_told_by_their_columns_and_a_missing_or_wrong_one_is_named(layout: str) -> None:
    row = PUBLISHED[layout]
    assert detect_layout(row) == layout
    read = read_published(row, "auto", "f:1")
    assert read.statement == "p"
    assert read.solutions == (() if layout == "still3" else ("s",))
    first = next(iter(row))
    without = {name: value for name, value in row.items() if name != first}
    with pytest.raises(DataError, match=rf"f:1: no column '.*{first}.*layout '{layout}' has; this row has"):
        read_published(without, layout, "f:1")
    with pytest.raises(DataError, match=rf"f:1: column '{first}': found 7 \(int\), expected text"):
        read_published({**row, first: 7}, layout, "f:1")
    with pytest.raises(DataError, match="are of no known layout; expected prompt and answer"):
        read_published({"something": "else"}, "auto", "f:1")
