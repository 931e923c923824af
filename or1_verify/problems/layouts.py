"""Read the published sets' columns into one record. Empty values stay empty; wrong columns or types are named.

Columns as on the hub: AI-MO/NuminaMath-1.5, agentica-org/DeepScaleR-Preview-Dataset, RUC-AIBOX/STILL-3-Preview-RL-Data,
KbsdJames/Omni-MATH, BAAI/TACO, newfacade/LeetCodeDataset, AIME 2024/2025 in their common forms, LiveCodeBench's
code_generation_lite, and Skywork/Skywork-OR1-RL-Data itself. Held-out sets: HuggingFaceH4/MATH-500, math-ai/amc23,
math-ai/minervamath, openai/gsm8k, math-ai/olympiadbench, openai/openai_humaneval, google-research-datasets/mbpp. And
MATH as first published (hendrycks/math), whose answers are boxed in the solutions; Minerva's problems also come so. For
RL: BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024, ganler/code-r1-12k (as Skywork-OR1-RL-Data), SynthLabsAI/Big-Math-RL
(as DeepScaleR), zwhe99/DeepMath-103K, nvidia/OpenMathReasoning, PrimeIntellect/INTELLECT-2-RL-Dataset, inclusionAI/
AReaL-RL-Data, allenai/RLVR-GSM-MATH-IF-Mixed-Constraints, Open-Reasoner-Zero/orz_math_57k_collection,
agentica-org/DeepCoder-Preview-Dataset, KodCode/KodCode-V1, TIGER-Lab/AceCode-87K, deepmind/code_contests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from or1_verify.answer import is_answered_once, last_box
from or1_verify.problems.rows import MISSING, RowError, check_no_image, parse_row, shown
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


def detect_layout(columns: Mapping[str, Any]) -> str | None:
    """Return the layout that has such columns, the narrowest of several; None when no known layout has them."""
    return next(iter(fitting_layouts(columns)), None)


def fitting_layouts(columns: Mapping[str, Any]) -> list[str]:
    """Return all layouts that have such columns, the narrowest first."""
    return list(dict.fromkeys(layout for layout, telling, _ in _LAYOUTS if telling <= columns.keys()))


def read_published(row: Any, layout: str, origin: str) -> Published:
    """Read one decoded row. Raises RowError naming ``origin``, the column, what was found and what was expected."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError(origin, "not a JSON object", f"expected one problem's columns, found {shown(row)}")
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
        name = self._first(names)
        value = self.row[name]
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._wrong(name, f"found {shown(value)}, expected text")
        return value if value.strip() else ""

    def answer(self, *names: str) -> str:
        """Return text or a number, as text."""
        name = self._first(names)
        value = self.row[name]
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._wrong(name, f"found {shown(value)}, expected text or a number")
        whole = isinstance(value, float) and value.is_integer()  # as amc23's 27.0
        text = str(int(value) if whole else value).strip()
        return "" if text.lower() in MISSING else text

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
        value = self.row[self._first((name,))]
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

    def _first(self, names: tuple[str, ...]) -> str:
        for name in names:
            if name in self.row:
                return name
        missing = f"no column '{' or '.join(names)}'"
        raise RowError(
            self.origin, missing, f"{missing}, which layout '{self.layout}' has; this row has {sorted(self.row)}"
        )

    def _wrong(self, name: str, detail: str) -> RowError:
        return RowError(self.origin, f"column '{name}' has a wrong type", f"column '{name}': {detail}")


def _golds(answer: str) -> str:
    return json.dumps([answer], ensure_ascii=False) if answer else ""


def _some(*solutions: str) -> tuple[str, ...]:
    return tuple(solution for solution in solutions if solution)


def _check_choices(row: Mapping[str, Any], published: Published, origin: str) -> None:
    """Raise RowError where the answer is one of several choices, by letter or number, and the prompt shows none."""
    for name in ("choices", "options"):
        texts = row.get(name)
        texts = [str(text) for text in (texts.values() if isinstance(texts, Mapping) else texts or ())]
        named = published.ability == "math" and published.ground_truth not in map(_golds, texts)
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
    return Published(row.ability, statement, row.ground_truth, source, "", _some(solution), row.difficulty)


def _answered(row: Columns) -> Published:
    """Math with its answer, under the names of many sets. GSM8K's answer is a solution that ends in ``#### 1,234``."""
    given = row.answer("final_answer", "expected_answer", "reference_answer", "answer", "Answer")
    worked, marked, gold = given.rpartition("####")
    names = ("solution", "Solution", "generated_solution", "r1_solution_1", "r1_solution_2", "r1_solution_3")
    others = {name: value.strip() for name, value in row.row.items() if isinstance(value, str) and value.strip()}
    return Published(
        "math",
        row.text("problem", "Problem", "question"),
        _golds(gold.strip().replace(",", "") if marked else gold),
        source=others.get("source") or others.get("problem_source", ""),
        solutions=_some(worked.strip(), *(others.get(name, "") for name in names)),
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
    gold = _golds(last_box(solution) or "")
    return Published("math", row.text("problem"), gold, solutions=_some(solution))


def _olympiadbench(row: Columns) -> Published:
    """All parts of the final answer are asked for, each of which the set writes between dollars."""
    if "final_answer" not in row.row:
        row.text("final_answer")  # names the column
    golds = [gold.strip().removeprefix("$").removesuffix("$") for gold in row.texts("final_answer")]
    return Published(
        "math",
        "\n".join(_some(row.optional("context"), row.text("question"))),
        _golds(", ".join(filter(None, golds))),
        source=row.optional("subfield"),
        solutions=tuple(row.texts("solution")),
    )


def _taco(row: Columns) -> Published:
    tests = row.decoded("input_output", dict)
    solutions = row.decoded("solutions", list) or []
    starter = row.optional("starter_code")
    pictures = row.optional("picture_num") if isinstance(row.row.get("picture_num"), str) else ""
    return Published(
        "code",
        row.text("question"),
        json.dumps(tests, ensure_ascii=False) if tests else "",
        source=row.optional("difficulty").lower(),
        instructions=BEGINS_WITH.format(starter) if starter else READS_STDIN,
        solutions=_some(*(solution for solution in solutions if isinstance(solution, str))),
        notes={"pictures": int(pictures)} if pictures.isdecimal() and int(pictures) else {},
    )


def _leetcode(row: Columns) -> Published:
    test = row.text("test")
    truth = {"entry_point": row.text("entry_point"), "import_prefix": row.text("prompt"), "test_code": test}
    return Published(
        "code",
        row.text("problem_description"),
        json.dumps(truth, ensure_ascii=False) if test else "",
        source=row.optional("difficulty"),
        instructions=BEGINS_WITH.format(row.text("starter_code")),
        solutions=_some(row.text("completion")),
    )


def _livecodebench(row: Columns) -> Published:
    """Leave the tests packed: the code verifier reads this form itself, and refuses any other."""
    starter = row.verbatim("starter_code")
    tests = {name: row.row.get(name) or "" for name in ("public_test_cases", "private_test_cases", "metadata")}
    truth = {**tests, "starter_code": starter}
    some = any(tests[name] not in ("", "[]") for name in ("public_test_cases", "private_test_cases"))
    return Published(
        "code",
        row.verbatim("question_content"),
        json.dumps(truth, ensure_ascii=False) if some else "",
        source=row.optional("platform"),
        instructions=livecodebench_instructions(starter),
        notes={name: str(row.row[name]) for name in ("question_id", "contest_date") if row.row.get(name) is not None},
        opening=LIVECODEBENCH_OPENING,
    )


def _humaneval(row: Columns) -> Published:
    """The statement is the beginning of a program."""
    program, test, entry = row.verbatim("prompt"), row.verbatim("test"), row.text("entry_point")
    truth = {"entry_point": entry, "import_prefix": program, "test_code": test}
    return Published(
        "code",
        program,
        json.dumps(truth, ensure_ascii=False) if test else "",
        instructions=COMPLETE_END,
        solutions=_some(program + row.verbatim("canonical_solution")),
        opening=COMPLETE,
    )


def _mbpp(row: Columns) -> Published:
    """The full form (``text``, ``test_setup_code``), the sanitized (``prompt``, ``test_imports``), and MBPP+, whose
    ``test`` is one program; the prompt shows only ``test_list``."""
    tests = row.texts("test_list")
    cases = [*_some(row.optional("test_setup_code"), *row.texts("test_imports")), *tests]
    program = row.optional("test")
    return Published(
        "code",
        row.text("text", "prompt"),
        json.dumps({"assert_case": [program] if program else cases}, ensure_ascii=False) if tests else "",
        instructions=MBPP_TESTS.format("\n".join(tests)) + ONE_BLOCK,
        solutions=_some(row.text("code")),
        opening=MBPP_OPENING,
    )


def _intellect2(row: Columns) -> Published:
    """Math: {ground_truth}; code: {test_cases: [{input, output, fn_name}]}. Other kinds of task have no verifier."""
    task, truth = row.text("task_type"), row.decoded("verification_info", dict) or {}
    if task == "verifiable_math":
        gold = str(truth.get("ground_truth") or "").strip().removeprefix("$").removesuffix("$")
        return Published("math", row.text("prompt"), _golds(gold))
    if "code" not in task:
        raise RowError(row.origin, f"task_type '{task}'", f"column 'task_type': found '{task}', expected math or code")
    if (language := str(truth.get("language") or "python").lower()) != "python":
        raise RowError(row.origin, f"language '{language}'", f"verification_info: language {language}, expected python")
    return Published("code", row.text("prompt"), _cases(truth.get("test_cases") or []))


def _areal(row: Columns) -> Published:
    golds = _some(*(last_box(solution) or "" for solution in row.texts("solutions")))
    return Published("math", row.text("prompt"), json.dumps(golds, ensure_ascii=False) if golds else "")


def _rlvr(row: Columns) -> Published:
    """The user's message as it is, worked examples included. Later sets have lists of one, and tasks of other kinds."""
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
    return Published("math", str(messages[0].get("content") or "").strip(), _golds(gold), source=str(named).lower())


def _orz(row: Columns) -> Published:
    """Two turns: {from, value}, {from, ground_truth: {value}}."""
    asked, answered = row.decoded("0", dict) or {}, row.decoded("1", dict) or {}
    gold = Columns(answered.get("ground_truth") or {"value": None}, row.layout, row.origin).answer("value")
    return Published("math", str(asked.get("value") or "").strip(), _golds(gold))


def _deepcoder(row: Columns) -> Published:
    tests = row.decoded("tests", object)
    starter = row.optional("starter_code")
    if isinstance(tests, list):
        metadata = row.decoded("metadata", dict) if "metadata" in row.row else None
        truth = _cases(tests, (metadata or {}).get("func_name"))
    else:
        truth = json.dumps(tests, ensure_ascii=False) if tests else ""
    solutions = row.decoded("solutions", list) if "solutions" in row.row else []
    return Published(
        "code",
        row.text("problem"),
        truth,
        instructions=BEGINS_WITH.format(starter) if starter else READS_STDIN,
        solutions=_some(*(solution for solution in solutions or [] if isinstance(solution, str))),
    )


def _kodcode(row: Columns) -> Published:
    """Its tests are functions for pytest that import the solution; here they are called one by one."""
    test, infos = row.verbatim("test"), (row.decoded("test_info", list) or []) if "test_info" in row.row else []
    told: Mapping[str, Any] = next((item for item in infos if isinstance(item, Mapping)), {})
    imported = re.search(r"^from solution import (\w+)", test, flags=re.MULTILINE)
    entry = told.get("function_name") or (imported and imported[1])
    if not entry:
        expected = "expected a function_name in test_info, or an import from solution in test"
        raise RowError(row.origin, "no name of the function", f"column 'test': {expected}")
    body = re.sub(r"^from solution import .*$", "", test, flags=re.MULTILINE)
    calls = re.findall(r"^def (test\w*)\(\s*\)", body, flags=re.MULTILINE)
    check = "\n\ndef check(candidate):\n" + "".join(f"    {call}()\n" for call in calls)
    truth = {"entry_point": entry, "import_prefix": "", "test_code": body + check}
    declared = told.get("function_declaration") or ""
    return Published(
        "code",
        row.text("question"),
        json.dumps(truth, ensure_ascii=False) if calls else "",
        source=row.optional("subset"),
        instructions=BEGINS_WITH.format(declared) if declared else ONE_BLOCK,
        solutions=_some(row.verbatim("solution")),
    )


def _acecode(row: Columns) -> Published:
    tests = row.texts("test_cases")
    truth = json.dumps({"assert_case": tests}, ensure_ascii=False) if tests else ""
    return Published("code", row.text("question"), truth, instructions=ONE_BLOCK)


def _code_contests(row: Columns) -> Published:
    if file := row.optional("input_file"):
        detail = f"column 'input_file': programs are to read {file}; expected tests by standard input"
        raise RowError(row.origin, "input from a file", detail)
    parts = [row.decoded(f"{kind}_tests", dict) or {} for kind in ("public", "private", "generated")]
    inputs, outputs = ([item for part in parts for item in part.get(side) or []] for side in ("input", "output"))
    truth = json.dumps({"inputs": inputs, "outputs": outputs}, ensure_ascii=False) if inputs else ""
    return Published("code", row.text("description"), truth, instructions=READS_STDIN)


def _cases(cases: Any, function: str | None = None) -> str:
    """Return the ground truth of test cases {input, output, fn_name?}, one by one as several sets have them."""
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases) or not cases:
        return ""
    named = function or next((case["fn_name"] for case in cases if case.get("fn_name")), None)
    truth = {"inputs": [case.get("input") for case in cases], "outputs": [case.get("output") for case in cases]}
    return json.dumps(truth | ({"fn_name": named} if named else {}), ensure_ascii=False)


_LAYOUTS: tuple[tuple[str, frozenset[str], Callable[[Columns], Published]], ...] = (
    ("skywork", frozenset({"prompt", "reward_model"}), _own_layout),
    ("livecodebench", frozenset({"question_content", "public_test_cases"}), _livecodebench),
    ("humaneval", frozenset({"prompt", "canonical_solution", "test"}), _humaneval),
    ("mbpp", frozenset({"task_id", "test_list"}), _mbpp),
    ("kodcode", frozenset({"question", "solution", "test"}), _kodcode),
    ("acecode", frozenset({"question", "test_cases"}), _acecode),
    ("code_contests", frozenset({"description", "public_tests", "private_tests", "generated_tests"}), _code_contests),
    ("deepmath", frozenset({"question", "final_answer", "r1_solution_1"}), _answered),
    ("olympiadbench", frozenset({"question", "final_answer"}), _olympiadbench),
    ("intellect2", frozenset({"prompt", "task_type", "verification_info"}), _intellect2),
    ("areal", frozenset({"prompt", "solutions", "query_id"}), _areal),
    ("rlvr", frozenset({"messages", "ground_truth"}), _rlvr),
    ("orz", frozenset({"0", "1"}), _orz),
    ("deepcoder", frozenset({"problem", "tests"}), _deepcoder),
    ("openmath", frozenset({"problem", "expected_answer"}), _answered),
    ("leetcode", frozenset({"problem_description", "entry_point", "test"}), _leetcode),
    ("taco", frozenset({"question", "input_output"}), _taco),
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
"""Names, the columns that tell a layout, and its reader; the most particular first."""
