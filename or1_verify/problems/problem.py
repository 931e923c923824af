"""Decoded rows into ``Problem`` records, strictly: a row that cannot be used is named by file, line and field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import from_json

from or1_verify.problems.layouts import detect_layout, read_published
from or1_verify.problems.rows import RowError, parse_row, problem_id, shown
from or1_verify.types import Message, Problem, Verifier


def read_problem(raw: Any, origin: str, default_source: str) -> Problem:
    """Return the problem of one decoded row; ``origin`` is ``file:line``. Raises RowError."""
    if isinstance(raw, RowError):
        raise raw
    layout = detect_layout(raw) if isinstance(raw, dict) else None
    if layout not in (None, "skywork", "plain"):
        return _of_another_layout(raw, origin, default_source)
    problem = parse_row(raw, origin, default_source)
    _check_is_json(problem.ground_truth, "reward_model.ground_truth" if "reward_model" in raw else "answer", origin)
    return problem


def ground_truth_fault(problem: Problem, verifiers: Mapping[str, Verifier]) -> RowError | None:
    """Return the error of a problem whose ability has no verifier, or whose verifier cannot use the ground truth."""
    if problem.ability not in verifiers:
        return no_verifier(problem, verifiers)
    try:
        verifiers[problem.ability].check_ground_truth(problem)
    except ValueError as error:
        return RowError(problem.origin, "ground truth cannot be used", f"field 'ground_truth': {error}")
    return None


def no_verifier(problem: Problem, known: Iterable[str]) -> RowError:
    """Return the error of a problem whose ability is none of ``known``."""
    expected = ", ".join(sorted(known)) or "none"
    return RowError(
        problem.origin,
        f"no verifier for ability '{problem.ability}'",
        f"field 'ability': found '{problem.ability}', expected one of: {expected}",
    )


def _of_another_layout(raw: Any, origin: str, set_name: str) -> Problem:
    row = read_published(raw, "auto", origin)
    for what, value in (("statement", row.statement), ("answer or tests", row.ground_truth)):
        if not value:
            expected = "expected one in every row (or1 data build leaves such rows out)"
            raise RowError(origin, f"no {what}", f"has no {what}; {expected}")
    source = f"{set_name}_{row.source}" if row.source else set_name
    messages = (Message("user", row.content),)
    return Problem(
        problem_id(source, messages), source, row.ability, messages, row.ground_truth, row.difficulty, origin
    )


def _check_is_json(ground_truth: str, field: str, origin: str) -> None:
    try:
        decoded = from_json(ground_truth, allow_inf_nan=False)
        fault = "" if isinstance(decoded, list | dict) else f"found the JSON of a {type(decoded).__name__}"
    except ValueError as error:
        fault = f"not JSON ({error})"
    if fault:
        raise RowError(
            origin,
            f"field '{field}' is not the JSON of a list or an object",
            f"field '{field}': {fault}, found {shown(ground_truth)}; expected a string that holds a JSON list of "
            'answers, such as ["15625"], or the JSON object of a code problem\'s tests',
        )
