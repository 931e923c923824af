"""Detects the column layout of a row of a published problem set, and reads the row into one common record.

Columns as on the hub: AI-MO/NuminaMath-1.5, agentica-org/DeepScaleR-Preview-Dataset, RUC-AIBOX/STILL-3-Preview-RL-Data,
KbsdJames/Omni-MATH, BAAI/TACO, newfacade/LeetCodeDataset, AIME 2024/2025 in their common forms, LiveCodeBench's
code_generation_lite, and Skywork/Skywork-OR1-RL-Data itself. Held-out sets: HuggingFaceH4/MATH-500, math-ai/amc23,
math-ai/minervamath, openai/gsm8k, math-ai/olympiadbench, openai/openai_humaneval, google-research-datasets/mbpp. Also
MATH as first published (hendrycks/math), and Minerva in that form: the answers are boxed in the solutions. For
RL: BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024, ganler/code-r1-12k (as Skywork-OR1-RL-Data), SynthLabsAI/Big-Math-RL
(as DeepScaleR), zwhe99/DeepMath-103K, nvidia/OpenMathReasoning, PrimeIntellect/INTELLECT-2-RL-Dataset, inclusionAI/
AReaL-RL-Data, allenai/RLVR-GSM-MATH-IF-Mixed-Constraints, Open-Reasoner-Zero/orz_math_57k_collection,
agentica-org/DeepCoder-Preview-Dataset, KodCode/KodCode-V1, TIGER-Lab/AceCode-87K, deepmind/code_contests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from or1_verify.answer import is_answered_once, last_box
from or1_verify.problems import code_layouts as code
from or1_verify.problems.columns import Columns, Published, golds, some
from or1_verify.problems.rows import RowError, check_no_image, parse_row, shown


def detect_layout(columns: Mapping[str, Any]) -> str | None:
    """Return the column layout of a row (the most specific that fits its columns), or None if no layout fits."""
    return next(iter(fitting_layouts(columns)), None)


def fitting_layouts(columns: Mapping[str, Any]) -> list[str]:
    """Return all column layouts whose required columns are in ``columns``, the most specific first."""
    return list(dict.fromkeys(layout for layout, telling, _ in _LAYOUTS if telling <= columns.keys()))


def read_published(row: Any, layout: str, origin: str) -> Published:
    """Read one decoded row in the given column layout; "auto" detects the layout.

    Raises RowError with ``origin``, the column and the fault.
    """
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(origin, "not a JSON object", f"expected a JSON object, found {shown(row)}")
    if layout == "auto":
        detected = detect_layout(row)
        if detected is None:
            expected = "expected prompt and answer, a set of docs/data.md, or names such as columns: {prompt: question}"
            detail = f"columns {sorted(row)} are of no known layout; {expected}"
            raise RowError(origin, "columns of no known layout", detail)
        layout = detected
    check_no_image(row, origin)
    reader = next(reader for name, _, reader in _LAYOUTS if name == layout)
    published = reader(Columns(row, layout, origin))
    _check_choices(row, published, origin)
    return published


def _check_choices(row: Mapping[str, Any], published: Published, origin: str) -> None:
    """Raise RowError if the answer is the letter or number of a choice, and the prompt does not show the choices."""
    for name in ("choices", "options"):
        texts = row.get(name)
        texts = [str(text) for text in (texts.values() if isinstance(texts, Mapping) else texts or ())]
        named = published.ability == "math" and published.ground_truth not in map(golds, texts)
        if named and not all(text in published.content for text in texts):
            detail = f"column '{name}': the answer names one of these choices, which the prompt would not show"
            raise RowError(origin, "choices outside the prompt", detail)


def _only_user(roles: Sequence[str], column: str, origin: str) -> None:
    if list(roles) != ["user"]:
        detail = f"field '{column}': found messages of {roles}; expected one message of the user, as this layout has"
        raise RowError(origin, f"field '{column}' is not one user message", detail)


def _own_layout(columns: Columns) -> Published:
    row = parse_row(dict(columns.row), columns.origin)
    _only_user([message.role for message in row.messages], "prompt", columns.origin)
    statement, source, solution = row.messages[0].content, row.source or "", columns.optional("solution")
    return Published(row.ability, statement, row.ground_truth, source, "", some(solution), row.difficulty)


def _answered(row: Columns) -> Published:
    """Read a math problem and its answer from columns that many sets have. GSM8K's answers end in ``#### 1,234``."""
    given = row.answer("final_answer", "expected_answer", "reference_answer", "answer", "Answer")
    worked, marked, gold = given.rpartition("####")
    names = ("solution", "Solution", "generated_solution", "r1_solution_1", "r1_solution_2", "r1_solution_3")
    others = {name: value.strip() for name, value in row.row.items() if isinstance(value, str) and value.strip()}
    return Published(
        "math",
        row.text("problem", "Problem", "question"),
        golds(gold.strip().replace(",", "") if marked else gold),
        source=others.get("source") or others.get("problem_source", ""),
        solutions=some(worked.strip(), *(others.get(name, "") for name in names)),
        notes={
            name: others[name] for name in ("question_type", "problem_is_valid", "solution_is_valid") if name in others
        },
    )


def _math(row: Columns) -> Published:
    solution = row.text("solution")
    if not is_answered_once(solution):
        detail = (
            f"column 'solution': found several boxes that are no one list, in {solution[-200:]!r}; expected one answer"
        )
        raise RowError(row.origin, "several boxes in the solution", detail)
    gold = golds(last_box(solution) or "")
    return Published("math", row.text("problem"), gold, solutions=some(solution))


def _olympiadbench(row: Columns) -> Published:
    """Read a row of OlympiadBench. The gold joins all parts of the answer, each of which is between dollar signs."""
    if "final_answer" not in row.row:
        row.text("final_answer")  # names the column
    parts = [gold.strip().removeprefix("$").removesuffix("$") for gold in row.texts("final_answer")]
    return Published(
        "math",
        "\n".join(some(row.optional("context"), row.text("question"))),
        golds(", ".join(filter(None, parts))),
        source=row.optional("subfield"),
        solutions=tuple(row.texts("solution")),
    )


def _areal(row: Columns) -> Published:
    boxed = some(*map(last_box, row.texts("solutions")))
    return Published("math", row.text("prompt"), json.dumps(boxed, ensure_ascii=False) if boxed else "")


def _rlvr(row: Columns) -> Published:
    """Read a row of RLVR. The prompt is the user's message with its worked examples. Raises RowError if not math."""
    named, truth = (
        value[0] if isinstance(value, list) and len(value) == 1 else value
        for value in (row.row.get("dataset") or "math", row.row["ground_truth"])
    )
    if not re.search("math|gsm", str(named).lower()):
        detail = f"column 'dataset': found {shown(named)}, which has no verifier; expected a set of math, such as gsm8k"
        raise RowError(row.origin, f"dataset {named!r}", detail)
    messages = [message for message in row.decoded("messages", list) or [] if isinstance(message, Mapping)]
    _only_user([str(message.get("role")) for message in messages], "messages", row.origin)
    gold = Columns({"ground_truth": truth}, row.layout, row.origin).answer("ground_truth")
    return Published("math", str(messages[0].get("content") or "").strip(), golds(gold), source=str(named).lower())


def _orz(row: Columns) -> Published:
    """Read a row of Open-Reasoner-Zero: two turns, {from, value} and {from, ground_truth: {value}}."""
    asked, answered = row.decoded("0", dict) or {}, row.decoded("1", dict) or {}
    gold = Columns(answered.get("ground_truth") or {"value": None}, row.layout, row.origin).answer("value")
    return Published("math", str(asked.get("value") or "").strip(), golds(gold))


_LAYOUTS: tuple[tuple[str, frozenset[str], Callable[[Columns], Published]], ...] = (
    ("skywork", frozenset({"prompt", "reward_model"}), _own_layout),
    ("livecodebench", frozenset({"question_content", "public_test_cases"}), code.livecodebench),
    ("humaneval", frozenset({"prompt", "canonical_solution", "test"}), code.humaneval),
    ("mbpp", frozenset({"task_id", "test_list"}), code.mbpp),
    ("kodcode", frozenset({"question", "solution", "test"}), code.kodcode),
    ("acecode", frozenset({"question", "test_cases"}), code.acecode),
    (
        "code_contests",
        frozenset({"description", "public_tests", "private_tests", "generated_tests"}),
        code.code_contests,
    ),
    ("deepmath", frozenset({"question", "final_answer", "r1_solution_1"}), _answered),
    ("olympiadbench", frozenset({"question", "final_answer"}), _olympiadbench),
    ("intellect2", frozenset({"prompt", "task_type", "verification_info"}), code.intellect2),
    ("areal", frozenset({"prompt", "solutions", "query_id"}), _areal),
    ("rlvr", frozenset({"messages", "ground_truth"}), _rlvr),
    ("orz", frozenset({"0", "1"}), _orz),
    ("deepcoder", frozenset({"problem", "tests"}), code.deepcoder),
    ("openmath", frozenset({"problem", "expected_answer"}), _answered),
    ("leetcode", frozenset({"problem_description", "entry_point", "test"}), code.leetcode),
    ("taco", frozenset({"question", "input_output"}), code.taco),
    ("numinamath", frozenset({"problem", "question_type", "answer"}), _answered),
    ("omni_math", frozenset({"problem", "domain", "solution", "answer"}), _answered),
    ("plain", frozenset({"prompt", "answer"}), _own_layout),
    ("plain", frozenset({"prompt", "label"}), _own_layout),
    ("plain", frozenset({"prompt", "ground_truth"}), _own_layout),
    ("aime", frozenset({"Problem", "Answer"}), _answered),
    ("deepscaler", frozenset({"problem", "answer"}), _answered),
    ("still3", frozenset({"question", "answer"}), _answered),
    ("math", frozenset({"problem", "solution"}), _math),
)
"""(Name, required columns, reader) of each column layout, the most specific first."""
