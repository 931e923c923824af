"""Problem files into ``Problem`` records, strictly: a row that cannot be used is named by file, line and field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from or1_megatron.data.files import read_rows
from or1_megatron.data.layouts import detect_layout, read_published
from or1_megatron.data.rows import DataError, RowError, parse_row, shown
from or1_megatron.data.unusable import UnusableRows
from or1_megatron.interfaces import Verifier
from or1_megatron.types import Message, Problem

DIFFICULTY_TRIES = 16
"""``model_difficulty`` counts failures in this many tries (RECIPE section 7)."""

_ID_HEX_DIGITS = 16


def load_problems(
    path: Path, split: str | None = None, unusable: UnusableRows | None = None, subset: str | None = None
) -> list[Problem]:
    """Read all problems of a ``.jsonl`` or ``.parquet`` file, a folder of them, or a set on the hub, in their order.

    The layout is any of ``data.layouts``: Skywork-OR1-RL-Data, {prompt, answer}, AIME, LiveCodeBench, ... ``split``
    chooses among a folder's or a hub set's splits, such as math and code; ``subset`` is a hub set's configuration. That
    a ground truth can be read is left to ``check_ground_truths``, since the abilities that occur say which verifiers
    are needed.

    Args:
        unusable: takes the rows that cannot be used, a second row of the same problem among them; the caller settles
            them. None: they are refused.

    Raises:
        DataError: a file that is missing or cannot be read, a set without rows, or unusable rows.
    """
    path = Path(path)
    problems: list[Problem] = []
    origin_of: dict[str, str] = {}
    faults = UnusableRows() if unusable is None else unusable
    count = 0
    for origin, raw in read_rows(path, split, subset):
        count += 1
        try:
            problem = read_problem(raw, origin, default_source=path.stem)
            if problem.id in origin_of:
                raise RowError(
                    origin,
                    "the same problem as an earlier row",
                    f"the same problem as {origin_of[problem.id]} (source '{problem.source}' and messages are equal); "
                    "expected each problem once: delete one, or raise the source's repeat",
                )
        except RowError as error:
            faults.add(error)
        else:
            origin_of[problem.id] = origin
            problems.append(problem)
    if not count:
        raise DataError(f"{path}: holds no problems; expected at least one row")
    if unusable is None:
        faults.refuse()
    return problems


def read_problem(raw: Any, origin: str, default_source: str) -> Problem:
    """Return the problem of one decoded row; ``origin`` is ``file:line``. Raises RowError."""
    if isinstance(raw, RowError):
        raise raw
    layout = detect_layout(raw) if isinstance(raw, dict) else None
    if layout not in (None, "skywork", "plain"):
        return _of_another_layout(raw, origin, default_source)
    row = parse_row(raw, origin)
    _check_is_json(row.ground_truth, row.truth_field, origin)
    for model, failures in row.difficulty.items():
        if not 0 <= failures <= DIFFICULTY_TRIES:
            raise RowError(
                origin,
                "field 'extra_info' has a wrong type or value",
                f"field 'extra_info.model_difficulty.{model}': found {failures}, expected the number of failures in "
                f"{DIFFICULTY_TRIES} tries, 0..{DIFFICULTY_TRIES}",
            )
    source = row.source or default_source
    problem = problem_id(source, row.messages)
    return Problem(problem, source, row.ability, row.messages, row.ground_truth, row.difficulty, origin)


def check_ground_truths(
    problems: Sequence[Problem], verifiers: Mapping[str, Verifier], unusable: UnusableRows
) -> list[Problem]:
    """Return the problems whose ability has a verifier that can use their ground truth; the others are ``unusable``."""
    usable = []
    for problem in problems:
        try:
            check_ground_truth(problem, verifiers)
            usable.append(problem)
        except RowError as error:
            unusable.add(error)
    return usable


def check_ground_truth(problem: Problem, verifiers: Mapping[str, Verifier]) -> None:
    """Raise RowError when the problem's ability has no verifier, or its verifier cannot use the ground truth."""
    if problem.ability not in verifiers:
        raise no_verifier(problem, verifiers)
    try:
        verifiers[problem.ability].check_ground_truth(problem)
    except ValueError as error:
        raise RowError(problem.origin, "ground truth cannot be used", f"field 'ground_truth': {error}") from None


def no_verifier(problem: Problem, known: Iterable[str]) -> RowError:
    """Return the error of a problem whose ability is none of ``known``."""
    expected = ", ".join(sorted(known)) or "none"
    return RowError(
        problem.origin,
        f"no verifier for ability '{problem.ability}'",
        f"field 'ability': found '{problem.ability}', expected one of: {expected}",
    )


def filter_by_difficulty(problems: Sequence[Problem], model: str, unusable: UnusableRows) -> list[Problem]:
    """Return the problems that ``model`` neither always solved nor never (failures other than 0 and 16).

    A problem at which that model was not measured is ``unusable``. Raises DataError when nothing is left otherwise.
    """
    kept, before = [], len(unusable)
    for problem in problems:
        if model not in problem.difficulty:
            measured = ", ".join(sorted(problem.difficulty)) or "none"
            unusable.add(
                RowError(
                    problem.origin,
                    f"no model_difficulty of '{model}'",
                    f"field 'extra_info.model_difficulty': no entry for '{model}' (measured: {measured}); expected its "
                    f"failures in {DIFFICULTY_TRIES} tries; drop data.difficulty_model or name a measured model",
                )
            )
        elif problem.difficulty[model] not in (0, DIFFICULTY_TRIES):
            kept.append(problem)
    if not kept and len(unusable) == before:
        raise DataError(
            f"difficulty filter for '{model}' leaves none of {len(problems)} problems: at each it failed 0 or "
            f"{DIFFICULTY_TRIES} of {DIFFICULTY_TRIES} tries"
        )
    return kept


def problem_id(source: str, messages: Sequence[Message]) -> str:
    """Return a stable id: the first 64 bits, in hex, of the SHA-256 of source and messages."""
    text = json.dumps([source, [[message.role, message.content] for message in messages]], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_HEX_DIGITS]


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
    fault = f"field '{field}' is not the JSON of a list or an object"
    try:
        decoded = from_json(ground_truth, allow_inf_nan=False)
    except ValueError as error:
        raise RowError(
            origin,
            fault,
            f"field '{field}': not JSON ({error}), found {shown(ground_truth)}; expected a string that "
            'holds a JSON list of answers, such as ["15625"], or the JSON object of a code problem\'s tests',
        ) from None
    if not isinstance(decoded, list | dict):
        raise RowError(
            origin,
            fault,
            f"field '{field}': found the JSON of a {type(decoded).__name__}, {shown(ground_truth)}; "
            'expected that of a list of answers, such as ["15625"], or of an object of tests',
        )
