"""Readers of published sets of code problems (LiveCodeBench, TACO, MBPP, ...): one function per column layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from or1_verify.problems.columns import Columns, Published, golds, of_code, some
from or1_verify.problems.rows import RowError
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


def taco(row: Columns) -> Published:
    starter = row.optional("starter_code")
    pictures = row.optional("picture_num") if isinstance(row.row.get("picture_num"), str) else ""
    return of_code(
        row.text("question"),
        row.decoded("input_output", dict),
        source=row.optional("difficulty").lower(),
        instructions=BEGINS_WITH.format(starter) if starter else READS_STDIN,
        solutions=some(*(row.decoded("solutions", list) or [])),
        notes={"pictures": int(pictures)} if pictures.isdecimal() and int(pictures) else {},
    )


def leetcode(row: Columns) -> Published:
    test = row.text("test")
    truth = {"entry_point": row.text("entry_point"), "import_prefix": row.text("prompt"), "test_code": test}
    return of_code(
        row.text("problem_description"),
        test and truth,
        source=row.optional("difficulty"),
        instructions=BEGINS_WITH.format(row.text("starter_code")),
        solutions=some(row.text("completion")),
    )


def livecodebench(row: Columns) -> Published:
    """Read a row of LiveCodeBench. The tests stay packed, because the code verifier reads the packed form."""
    starter = row.verbatim("starter_code")
    tests = {name: row.row.get(name) or "" for name in ("public_test_cases", "private_test_cases", "metadata")}
    tested = any(tests[name] not in ("", "[]") for name in ("public_test_cases", "private_test_cases"))
    return of_code(
        row.verbatim("question_content"),
        tested and {**tests, "starter_code": starter},
        source=row.optional("platform"),
        instructions=livecodebench_instructions(starter),
        notes={name: str(row.row[name]) for name in ("question_id", "contest_date") if row.row.get(name) is not None},
        opening=LIVECODEBENCH_OPENING,
    )


def humaneval(row: Columns) -> Published:
    """Read a row of HumanEval, where the problem's statement is the beginning of a program."""
    program, test, entry = row.verbatim("prompt"), row.verbatim("test"), row.text("entry_point")
    return of_code(
        program,
        test and {"entry_point": entry, "import_prefix": program, "test_code": test},
        instructions=COMPLETE_END,
        solutions=some(program + row.verbatim("canonical_solution")),
        opening=COMPLETE,
    )


def mbpp(row: Columns) -> Published:
    """Read a row of MBPP (``text``, ``test_setup_code``), its sanitized form (``prompt``, ``test_imports``) or MBPP+.

    MBPP+'s tests are the program ``test``. The prompt shows only ``test_list``.
    """
    tests, program = row.texts("test_list"), row.optional("test")
    cases = [*some(row.optional("test_setup_code"), *row.texts("test_imports")), *tests]
    return of_code(
        row.text("text", "prompt"),
        tests and {"assert_case": [program] if program else cases},
        instructions=MBPP_TESTS.format("\n".join(tests)) + ONE_BLOCK,
        solutions=some(row.text("code")),
        opening=MBPP_OPENING,
    )


def intellect2(row: Columns) -> Published:
    """Read a row of INTELLECT-2: {ground_truth} for math, {test_cases: [{input, output, fn_name}]} for code.

    Raises RowError for other tasks.
    """
    task, truth = row.text("task_type"), row.decoded("verification_info", dict) or {}
    if task == "verifiable_math":
        gold = str(truth.get("ground_truth") or "").strip().removeprefix("$").removesuffix("$")
        return Published("math", row.text("prompt"), golds(gold))
    if "code" not in task:
        raise RowError(row.origin, f"task_type '{task}'", f"column 'task_type': found '{task}', expected math or code")
    if (language := str(truth.get("language") or "python").lower()) != "python":
        raise RowError(row.origin, f"language '{language}'", f"verification_info: language {language}, expected python")
    return of_code(row.text("prompt"), _cases(truth.get("test_cases")))


def deepcoder(row: Columns) -> Published:
    tests, starter = row.decoded("tests", object), row.optional("starter_code")
    if isinstance(tests, list):
        metadata = row.decoded("metadata", dict) if "metadata" in row.row else None
        tests = _cases(tests, (metadata or {}).get("func_name"))
    solutions = row.decoded("solutions", list) if "solutions" in row.row else []
    return of_code(
        row.text("problem"),
        tests,
        instructions=BEGINS_WITH.format(starter) if starter else READS_STDIN,
        solutions=some(*(solutions or [])),
    )


def kodcode(row: Columns) -> Published:
    """Read a row of KodCode. The tests are pytest functions, which become one function ``check`` that calls each."""
    test, infos = row.verbatim("test"), (row.decoded("test_info", list) or []) if "test_info" in row.row else []
    info: Mapping[str, Any] = next((item for item in infos if isinstance(item, Mapping)), {})
    imported = re.search(r"^from solution import (\w+)", test, flags=re.MULTILINE)
    entry = info.get("function_name") or (imported and imported[1])
    if not entry:
        expected = "expected a function_name in test_info, or an import from solution in test"
        raise RowError(row.origin, "no name of the function", f"column 'test': {expected}")
    body = re.sub(r"^from solution import .*$", "", test, flags=re.MULTILINE)
    calls = re.findall(r"^def (test\w*)\(\s*\)", body, flags=re.MULTILINE)
    check = "\n\ndef check(candidate):\n" + "".join(f"    {call}()\n" for call in calls)
    truth = {"entry_point": entry, "import_prefix": "", "test_code": body + check}
    declared = info.get("function_declaration") or ""
    return of_code(
        row.text("question"),
        calls and truth,
        source=row.optional("subset"),
        instructions=BEGINS_WITH.format(declared) if declared else ONE_BLOCK,
        solutions=some(row.verbatim("solution")),
    )


def acecode(row: Columns) -> Published:
    tests = row.texts("test_cases")
    return of_code(row.text("question"), tests and {"assert_case": tests}, instructions=ONE_BLOCK)


def code_contests(row: Columns) -> Published:
    if file := row.optional("input_file"):
        detail = f"column 'input_file': programs are to read {file}; expected tests by standard input"
        raise RowError(row.origin, "input from a file", detail)
    parts = [row.decoded(f"{kind}_tests", dict) or {} for kind in ("public", "private", "generated")]
    inputs, outputs = ([item for part in parts for item in part.get(side) or []] for side in ("input", "output"))
    truth = inputs and {"inputs": inputs, "outputs": outputs}
    return of_code(row.text("description"), truth, instructions=READS_STDIN)


def _cases(cases: Any, function: str | None = None) -> dict[str, Any]:
    """Return the ground truth for a list of test cases {input, output, fn_name?}; {} if ``cases`` is no such list."""
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases) or not cases:
        return {}
    named = function or next((case["fn_name"] for case in cases if case.get("fn_name")), None)
    truth = {"inputs": [case.get("input") for case in cases], "outputs": [case.get("output") for case in cases]}
    return truth | ({"fn_name": named} if named else {})
