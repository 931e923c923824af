"""Makes ``Problem`` records of decoded data rows. The error for an unusable row names its file, line and field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from or1_verify.problems.layouts import detect_layout, read_published
from or1_verify.problems.rows import RowError, parse_row
from or1_verify.types import Message, Problem, Verifier

_ID_HEX_DIGITS = 16


def read_problem(raw: Any, origin: str, default_source: str) -> Problem:
    """Return the problem in a decoded row of any known column layout; ``origin`` is ``file:line``. Raises RowError."""
    if isinstance(raw, RowError):
        raise raw
    if not isinstance(raw, dict) or detect_layout(raw) not in ("skywork", "plain"):
        return _of_another_layout(raw, origin, default_source)
    row = parse_row(raw, origin)
    source = row.source or default_source
    problem = problem_id(source, row.messages)
    return Problem(problem, source, row.ability, row.messages, row.ground_truth, row.difficulty, origin)


def check_ground_truth(problem: Problem, verifiers: Mapping[str, Verifier]) -> None:
    """Raise RowError if the problem's ability has no verifier, or the verifier cannot use the ground truth."""
    if problem.ability not in verifiers:
        raise no_verifier(problem, verifiers)
    try:
        verifiers[problem.ability].check_ground_truth(problem)
    except ValueError as error:
        raise RowError(problem.origin, "ground truth cannot be used", f"field 'ground_truth': {error}") from None


def no_verifier(problem: Problem, known: Iterable[str]) -> RowError:
    expected = ", ".join(sorted(known)) or "none"
    return RowError(
        problem.origin,
        f"no verifier for ability '{problem.ability}'",
        f"field 'ability': found '{problem.ability}', expected one of: {expected}",
    )


def problem_id(source: str, messages: Sequence[Message]) -> str:
    """Return a problem's stable id: the first 64 bits, in hex, of the SHA-256 of its source and messages."""
    text = json.dumps([source, [[message.role, message.content] for message in messages]], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_HEX_DIGITS]


def _of_another_layout(raw: Any, origin: str, set_name: str) -> Problem:
    row = read_published(raw, "auto", origin)
    for what, value in (("statement", row.statement), ("answer or tests", row.ground_truth)):
        if not value:
            expected = "expected one in every row (or1 data build leaves such rows out)"
            raise RowError(origin, f"no {what}", f"has no {what}; {expected}")
    if row.notes.get("pictures"):
        raise RowError(origin, "the problem has a picture", "the problem has pictures, which the model would not see")
    source = f"{set_name}_{row.source}" if row.source else set_name
    messages = (Message("user", row.content),)
    return Problem(
        problem_id(source, messages), source, row.ability, messages, row.ground_truth, row.difficulty, origin
    )
