"""Read the published sets' columns into one record. Empty values stay empty; wrong columns or types are named.

Columns as on the hub: AI-MO/NuminaMath-1.5, agentica-org/DeepScaleR-Preview-Dataset, RUC-AIBOX/STILL-3-Preview-RL-Data,
KbsdJames/Omni-MATH, BAAI/TACO, newfacade/LeetCodeDataset, AIME 2024/2025 in their common forms, LiveCodeBench's
code_generation_lite, and Skywork/Skywork-OR1-RL-Data itself. Held-out sets: HuggingFaceH4/MATH-500, math-ai/amc23,
math-ai/minervamath, openai/gsm8k, math-ai/olympiadbench, openai/openai_humaneval, google-research-datasets/mbpp. And
MATH as first published (hendrycks/math), whose answers are boxed in the solutions; Minerva's problems also come so. For
RL: BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024, ganler/code-r1-12k (as Skywork-OR1-RL-Data), SynthLabsAI/Big-Math-RL
(as DeepScaleR), zwhe99/DeepMath-103K, nvidia/OpenMathReasoning, PrimeIntellect/INTELLECT-2-RL-Dataset, inclusionAI/
AReaL-RL-Data, allenai/RLVR-GSM-MATH-IF-Mixed-Constraints, agentica-org/DeepCoder-Preview-Dataset, KodCode/KodCode-V1,
TIGER-Lab/AceCode-87K, deepmind/code_contests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from or1_verify.answer import is_answered_once, last_box
from or1_verify.problems.code_layouts import CODE_READERS
from or1_verify.problems.columns import Columns, Published, golds, some
from or1_verify.problems.rows import RowError, check_no_image, parse_row, shown

LayoutName = Literal[
    "auto", "skywork", "plain", "numinamath", "deepscaler", "still3", "omni_math", "taco", "leetcode", "aime",
    "livecodebench", "humaneval", "mbpp", "olympiadbench", "math", "deepmath", "openmath", "intellect2", "areal",
    "rlvr", "deepcoder", "kodcode", "acecode", "code_contests",
]  # fmt: skip


def detect_layout(columns: Mapping[str, Any]) -> LayoutName | None:
    """Return the layout that has such columns, the narrowest of several; None when no known layout has them."""
    return next(iter(fitting_layouts(columns)), None)


def fitting_layouts(columns: Mapping[str, Any]) -> list[LayoutName]:
    """Return all layouts that have such columns, the narrowest first."""
    return [layout for layout, telling in _TELLING if telling <= columns.keys()]


def read_published(row: Any, layout: LayoutName, origin: str) -> Published:
    """Read one decoded row. Raises RowError naming ``origin``, the column, what was found and what was expected."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(origin, "not a JSON object", f"expected one problem's columns, found {shown(row)}")
    if layout == "auto":
        detected = detect_layout(row)
        if detected is None:
            known = "; ".join(f"{name}: {', '.join(sorted(telling))}" for name, telling in _TELLING)
            detail = f"columns {sorted(row)} are of no known layout; expected one of: {known}"
            raise RowError(origin, "columns of no known layout", detail)
        layout = detected
    check_no_image(row, origin)
    if layout in ("skywork", "plain"):
        return _own_layout(row, origin)
    return _READERS[layout](Columns(row, layout, origin))


def _own_layout(raw: Mapping[str, Any], origin: str) -> Published:
    row = parse_row(dict(raw), origin)
    if len(row.messages) != 1 or row.messages[0].role != "user":
        roles = [message.role for message in row.messages]
        raise RowError(
            origin,
            "field 'prompt' is not one user message",
            f"field 'prompt': found messages of {roles}; the pipeline takes problems of one user message",
        )
    solution = Columns(raw, "skywork", origin).optional("solution")
    statement, source = row.messages[0].content, row.source or ""
    return Published(row.ability, statement, row.ground_truth, source, "", some(solution), row.difficulty)


def _numinamath(row: Columns) -> Published:
    notes = {name: row.optional(name) for name in ("question_type", "problem_is_valid", "solution_is_valid")}
    said = {name: value for name, value in notes.items() if value}
    return _solved(row, row.answer("answer"), source=row.text("source"), notes=said)


def _math(row: Columns) -> Published:
    solution = row.text("solution")
    if not is_answered_once(solution):
        detail = (
            f"column 'solution': found several boxes that are no one list, in {solution[-200:]!r}; expected one answer"
        )
        raise RowError(row.origin, "several boxes in the solution", detail)
    return _solved(row, last_box(solution) or "")


def _solved(row: Columns, gold: str, **more: Any) -> Published:
    return Published("math", row.text("problem"), golds(gold), solutions=some(row.text("solution")), **more)


def _still3(row: Columns) -> Published:
    """STILL-3, amc23, minervamath, and GSM8K, whose answer is a solution that ends in ``#### 1,234``."""
    solution, marked, gold = row.answer("answer").rpartition("####")
    if not marked:
        return Published("math", row.text("question"), golds(gold))
    return Published(
        "math", row.text("question"), golds(gold.strip().replace(",", "")), solutions=some(solution.strip())
    )


def _olympiadbench(row: Columns) -> Published:
    """All parts of the final answer are asked for, each of which the set writes between dollars."""
    if "final_answer" not in row.row:
        row.text("final_answer")  # names the column
    parts = [gold.strip().removeprefix("$").removesuffix("$") for gold in row.texts("final_answer")]
    return Published(
        "math",
        row.text("question"),
        golds(", ".join(filter(None, parts))),
        source=row.optional("subfield"),
        solutions=tuple(row.texts("solution")),
    )


def _omni_math(row: Columns) -> Published:
    return _solved(row, row.answer("answer"), source=row.optional("source"))


def _areal(row: Columns) -> Published:
    boxed = some(*map(last_box, row.texts("solutions")))
    return Published("math", row.text("prompt"), json.dumps(boxed, ensure_ascii=False) if boxed else "")


def _rlvr(row: Columns) -> Published:
    """The first user message as it is, worked examples included; constraints on the form have no verifier."""
    named, messages = row.optional("dataset").lower(), row.decoded("messages", list) or [{}]
    if named == "ifeval":
        raise RowError(row.origin, "dataset 'ifeval'", "column 'dataset': found 'ifeval', which has no verifier")
    statement = messages[0].get("content") if isinstance(messages[0], Mapping) else None
    return Published("math", str(statement or "").strip(), golds(row.answer("ground_truth")), source=named)


def _answered(statement: str, answer: str, solutions: str = "", source: str = "") -> Callable[[Columns], Published]:
    """Return the reader of rows whose columns hold what is named; of a statement's or answer's, the first there is."""

    def read(row: Columns) -> Published:
        gold, known = golds(row.answer(*answer.split())), some(*map(row.optional, solutions.split()))
        return Published("math", row.text(*statement.split()), gold, row.optional(source), solutions=known)

    return read


_PROBLEM_ANSWER = _answered("problem Problem question", "answer Answer", "solution Solution")
_READERS: Mapping[str, Callable[[Columns], Published]] = {
    **CODE_READERS,
    "numinamath": _numinamath,
    "deepscaler": _PROBLEM_ANSWER,
    "still3": _still3,
    "omni_math": _omni_math,
    "aime": _PROBLEM_ANSWER,
    "olympiadbench": _olympiadbench,
    "math": _math,
    "deepmath": _answered("question", "final_answer", "r1_solution_1 r1_solution_2 r1_solution_3"),
    "openmath": _answered("problem", "expected_answer", "generated_solution", "problem_source"),
    "areal": _areal,
    "rlvr": _rlvr,
}

_TELLING: tuple[tuple[LayoutName, frozenset[str]], ...] = (
    ("skywork", frozenset({"prompt", "reward_model"})),
    ("livecodebench", frozenset({"question_content", "public_test_cases"})),
    ("humaneval", frozenset({"prompt", "canonical_solution", "test"})),
    ("mbpp", frozenset({"task_id", "test_list"})),
    ("kodcode", frozenset({"question", "solution", "test"})),
    ("acecode", frozenset({"question", "test_cases"})),
    ("code_contests", frozenset({"description", "public_tests", "private_tests", "generated_tests"})),
    ("deepmath", frozenset({"question", "final_answer", "r1_solution_1"})),
    ("olympiadbench", frozenset({"question", "final_answer"})),
    ("intellect2", frozenset({"prompt", "task_type", "verification_info"})),
    ("areal", frozenset({"prompt", "solutions", "query_id"})),
    ("rlvr", frozenset({"messages", "ground_truth"})),
    ("deepcoder", frozenset({"problem", "tests"})),
    ("openmath", frozenset({"problem", "expected_answer"})),
    ("leetcode", frozenset({"problem_description", "entry_point", "test"})),
    ("taco", frozenset({"question", "input_output"})),
    ("numinamath", frozenset({"problem", "question_type", "answer"})),
    ("omni_math", frozenset({"problem", "domain", "solution", "answer"})),
    ("plain", frozenset({"prompt", "answer"})),
    ("plain", frozenset({"prompt", "label"})),
    ("plain", frozenset({"prompt", "ground_truth"})),
    ("aime", frozenset({"Problem", "Answer"})),
    ("deepscaler", frozenset({"problem", "answer"})),
    ("still3", frozenset({"question", "answer"})),
    ("math", frozenset({"problem", "solution"})),
)
"""The columns that tell a layout, the most particular first."""
