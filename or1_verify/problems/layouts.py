"""Read the published sets' columns into one record. Empty values stay empty; wrong columns or types are named.

Columns as on the hub: AI-MO/NuminaMath-1.5, agentica-org/DeepScaleR-Preview-Dataset, RUC-AIBOX/STILL-3-Preview-RL-Data,
KbsdJames/Omni-MATH, BAAI/TACO, newfacade/LeetCodeDataset, AIME 2024/2025 in their common forms, LiveCodeBench's
code_generation_lite, and Skywork/Skywork-OR1-RL-Data itself. Held-out sets: HuggingFaceH4/MATH-500, math-ai/amc23,
math-ai/minervamath, openai/gsm8k, math-ai/olympiadbench, openai/openai_humaneval, google-research-datasets/mbpp. And
MATH as first published (hendrycks/math), whose answers are boxed in the solutions; Minerva's problems also come so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from or1_verify.answer import last_box
from or1_verify.problems.rows import RowError, parse_row, shown
from or1_verify.problems.wording import (
    BEGINS_WITH,
    COMPLETE,
    COMPLETE_END,
    LIVECODEBENCH_OPENING,
    MBPP_OPENING,
    MBPP_TESTS,
    ONE_BLOCK,
    READS_STDIN,
    livecodebench_instructions,
)

LayoutName = Literal[
    "auto", "skywork", "plain", "numinamath", "deepscaler", "still3", "omni_math", "taco", "leetcode", "aime",
    "livecodebench", "humaneval", "mbpp", "olympiadbench", "math",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """A row of any layout. ``source`` follows the set's own name; "" where the row names none."""

    ability: str
    statement: str
    ground_truth: str
    """As Skywork-OR1-RL-Data has it; "" where the row has no answer or no tests."""
    source: str = ""
    instructions: str = ""
    solutions: tuple[str, ...] = ()
    difficulty: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""
    """What the prompt says before the statement, as ``instructions`` after it."""

    @property
    def content(self) -> str:
        """The user's message."""
        return self.opening + self.statement + self.instructions


def detect_layout(columns: Mapping[str, Any]) -> LayoutName | None:
    """Return the layout that has such columns; None when no known layout has them."""
    names = columns.keys()
    return next((layout for layout, (telling, _) in _LAYOUTS.items() if telling <= names), None)


def read_published(row: Any, layout: LayoutName, origin: str) -> Published:
    """Read one decoded row. Raises RowError naming ``origin``, the column, what was found and what was expected."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(origin, "not a JSON object", f"expected one problem's columns, found {shown(row)}")
    if layout == "auto":
        detected = detect_layout(row)
        if detected is None:
            known = "; ".join(f"{name}: {', '.join(sorted(telling))}" for name, (telling, _) in _LAYOUTS.items())
            detail = f"columns {sorted(row)} are of no known layout; expected one of: {known}"
            raise RowError(origin, "columns of no known layout", detail)
        layout = detected
    return _LAYOUTS[layout][1](Columns(row, layout, origin))


@dataclass(frozen=True, slots=True)
class Columns:
    """A row's values by name, each checked for its type."""

    row: Mapping[str, Any]
    layout: str
    origin: str

    def text(self, *names: str) -> str:
        """Return the value of the first of ``names`` that the row has, stripped; "" when it is null."""
        return self.verbatim(*names).strip()

    def verbatim(self, *names: str) -> str:
        """Return text as it is, for prompts in which every character counts; "" when it is null or white space."""
        value = self._value(names)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._wrong(names[0], f"found {shown(value)}, expected text")
        return value if value.strip() else ""

    def answer(self, *names: str) -> str:
        """Return text or a number, as text."""
        value = self._value(names)
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._wrong(names[0], f"found {shown(value)}, expected text or a number")
        whole = isinstance(value, float) and value.is_integer()  # as amc23's 27.0
        return str(int(value) if whole else value).strip()

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; empty when it is null or the row has no such column."""
        value = self.row.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, f"found {shown(value)}, expected a list of texts")
        return value

    def optional(self, name: str) -> str:
        return self.text(name) if name in self.row else ""

    def decoded(self, name: str, kind: type) -> Any:
        """Return the decoded JSON of a text column, or the value itself where it is decoded; None when empty."""
        value = self._value((name,))
        if isinstance(value, str):
            if not value.strip():
                return None
            try:
                value = json.loads(value)
            except ValueError as error:
                expected = f"expected the JSON of a {kind.__name__}"
                raise self._wrong(name, f"not JSON ({error}), found {shown(value)}; {expected}") from None
        if value is not None and not isinstance(value, kind):
            raise self._wrong(name, f"found {shown(value)}, expected a {kind.__name__}")
        return value

    def _value(self, names: tuple[str, ...]) -> Any:
        for name in names:
            if name in self.row:
                return self.row[name]
        missing = f"no column '{' or '.join(names)}'"
        raise RowError(
            self.origin, missing, f"{missing}, which layout '{self.layout}' has; this row has {sorted(self.row)}"
        )

    def _wrong(self, name: str, detail: str) -> RowError:
        return RowError(self.origin, f"column '{name}' has a wrong type", f"column '{name}': {detail}")


def _some(*solutions: str) -> tuple[str, ...]:
    return tuple(filter(None, solutions))


def _math_row(statement: str, gold: str, *solutions: str, **more: Any) -> Published:
    truth = json.dumps([gold], ensure_ascii=False) if gold else ""
    return Published("math", statement, truth, solutions=_some(*solutions), **more)


def _code_row(statement: str, truth: Mapping[str, Any] | None, *solutions: str, **more: Any) -> Published:
    """Return a row whose tests are in ``truth``; None: it has none."""
    text = json.dumps(truth, ensure_ascii=False) if truth else ""
    return Published("code", statement, text, solutions=_some(*solutions), **more)


def _own_layout(columns: Columns) -> Published:
    row = parse_row(dict(columns.row), columns.origin, default_source="")
    if len(row.messages) != 1 or row.messages[0].role != "user":
        roles = [message.role for message in row.messages]
        fault = "field 'prompt' is not one user message"
        detail = f"field 'prompt': found messages of {roles}; the pipeline takes problems of one user message"
        raise RowError(columns.origin, fault, detail)
    statement = row.messages[0].content
    solutions = _some(columns.optional("solution"))
    return Published(row.ability, statement, row.ground_truth, row.source, "", solutions, row.difficulty)


def _numinamath(row: Columns) -> Published:
    notes = {name: row.optional(name) for name in ("question_type", "problem_is_valid", "solution_is_valid")}
    said = {name: value for name, value in notes.items() if value}
    return _solved(row, row.answer("answer"), source=row.text("source"), notes=said)


def _problem_answer(row: Columns) -> Published:
    solution = row.optional("solution") or row.optional("Solution")
    return _math_row(row.text("problem", "Problem", "question"), row.answer("answer", "Answer"), solution)


def _math(row: Columns) -> Published:
    return _solved(row, last_box(row.text("solution")) or "")


def _solved(row: Columns, gold: str, **more: Any) -> Published:
    return _math_row(row.text("problem"), gold, row.text("solution"), **more)


def _still3(row: Columns) -> Published:
    """STILL-3, amc23, minervamath, and GSM8K, whose answer is a solution that ends in ``#### 1,234``."""
    solution, marked, gold = row.answer("answer").rpartition("####")
    if not marked:
        return _math_row(row.text("question"), gold)
    return _math_row(row.text("question"), gold.strip().replace(",", ""), solution.strip())


def _olympiadbench(row: Columns) -> Published:
    """All parts of the final answer are asked for, each of which the set writes between dollars."""
    if "final_answer" not in row.row:
        row.text("final_answer")  # names the column
    golds = [gold.strip().removeprefix("$").removesuffix("$") for gold in row.texts("final_answer")]
    gold, source = ", ".join(filter(None, golds)), row.optional("subfield")
    return _math_row(row.text("question"), gold, *row.texts("solution"), source=source)


def _omni_math(row: Columns) -> Published:
    return _solved(row, row.answer("answer"), source=row.optional("source"))


def _taco(row: Columns) -> Published:
    solutions = row.decoded("solutions", list) or []
    starter = row.optional("starter_code")
    pictures = row.optional("picture_num") if isinstance(row.row.get("picture_num"), str) else ""
    return _code_row(
        row.text("question"),
        row.decoded("input_output", dict),
        *(solution for solution in solutions if isinstance(solution, str)),
        source=row.optional("difficulty").lower(),
        instructions=BEGINS_WITH.format(starter) if starter else READS_STDIN,
        notes={"pictures": int(pictures)} if pictures.isdecimal() and int(pictures) else {},
    )


def _leetcode(row: Columns) -> Published:
    return _code_row(
        row.text("problem_description"),
        _check_program(row.text("entry_point"), row.text("prompt"), row.text("test")),
        row.text("completion"),
        source=row.optional("difficulty"),
        instructions=BEGINS_WITH.format(row.text("starter_code")),
    )


def _check_program(entry_point: str, prefix: str, test: str) -> Mapping[str, str] | None:
    return {"entry_point": entry_point, "import_prefix": prefix, "test_code": test} if test else None


def _livecodebench(row: Columns) -> Published:
    """Leave the tests packed: the code verifier reads this form itself, and refuses any other."""
    starter = row.verbatim("starter_code")
    tests = {name: row.row.get(name) or "" for name in ("public_test_cases", "private_test_cases", "metadata")}
    some = any(tests[name] not in ("", "[]") for name in ("public_test_cases", "private_test_cases"))
    return _code_row(
        row.verbatim("question_content"),
        {**tests, "starter_code": starter} if some else None,
        source=row.optional("platform"),
        instructions=livecodebench_instructions(starter),
        notes={name: str(row.row[name]) for name in ("question_id", "contest_date") if row.row.get(name) is not None},
        opening=LIVECODEBENCH_OPENING,
    )


def _humaneval(row: Columns) -> Published:
    """The statement is the beginning of a program."""
    program = row.verbatim("prompt")
    return _code_row(
        program,
        _check_program(row.text("entry_point"), program, row.verbatim("test")),
        program + row.verbatim("canonical_solution"),
        instructions=COMPLETE_END,
        opening=COMPLETE,
    )


def _mbpp(row: Columns) -> Published:
    """Both forms: full (``text``, ``test_setup_code``) and sanitized (``prompt``, ``test_imports``)."""
    tests = row.texts("test_list")
    setup = _some(row.optional("test_setup_code"), *row.texts("test_imports"))
    return _code_row(
        row.text("text", "prompt"),
        {"assert_case": [*setup, *tests]} if tests else None,
        row.text("code"),
        instructions=MBPP_TESTS.format("\n".join(tests)) + ONE_BLOCK,
        opening=MBPP_OPENING,
    )


_LAYOUTS: Mapping[LayoutName, tuple[frozenset[str], Callable[[Columns], Published]]] = {
    "skywork": (frozenset({"data_source", "prompt", "reward_model"}), _own_layout),
    "livecodebench": (frozenset({"question_content", "public_test_cases"}), _livecodebench),
    "humaneval": (frozenset({"prompt", "canonical_solution", "test"}), _humaneval),
    "mbpp": (frozenset({"task_id", "test_list"}), _mbpp),
    "olympiadbench": (frozenset({"question", "final_answer"}), _olympiadbench),
    "leetcode": (frozenset({"problem_description", "entry_point", "test"}), _leetcode),
    "taco": (frozenset({"question", "input_output"}), _taco),
    "numinamath": (frozenset({"problem", "question_type", "answer"}), _numinamath),
    "omni_math": (frozenset({"problem", "domain", "answer"}), _omni_math),
    "plain": (frozenset({"prompt", "answer"}), _own_layout),
    "aime": (frozenset({"Problem", "Answer"}), _problem_answer),
    "deepscaler": (frozenset({"problem", "answer"}), _problem_answer),
    "still3": (frozenset({"question", "answer"}), _still3),
    "math": (frozenset({"problem", "solution"}), _math),
}
"""The columns that tell a layout, and what reads its rows; the most particular layout first."""
