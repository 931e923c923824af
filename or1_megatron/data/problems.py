"""Problem files into ``Problem`` records, strictly: a row that cannot be used is refused by file, line and field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from or1_megatron.data.files import read_rows
from or1_megatron.data.layouts import detect_layout, read_published
from or1_megatron.data.rows import DataError, PlainRow, parse_row, shown
from or1_megatron.interfaces import Verifier
from or1_megatron.types import Message, Problem

DIFFICULTY_TRIES = 16
"""``model_difficulty`` counts failures in this many tries (RECIPE section 7)."""

_ID_HEX_DIGITS = 16


def load_problems(
    path: Path, verifiers: Mapping[str, Verifier] | None = None, split: str | None = None
) -> list[Problem]:
    """All problems of a ``.jsonl`` or ``.parquet`` file, a folder of them, or a set on the hub, in their order.

    Any layout of ``data.layouts`` will do: Skywork-OR1-RL-Data, {prompt, answer}, AIME, LiveCodeBench, ...
    ``split`` chooses among a folder's or a hub set's splits, such as math and code.

    With ``verifiers`` (by ability) each ground truth is checked as well; without, only that it is JSON: load, see
    which abilities occur, build their verifiers, then ``check_ground_truths``. Raises DataError naming file:line
    (parquet: file:row, from 1), the field, what was found and what was expected; also for a missing or empty file
    and for a problem that occurs twice.
    """
    path = Path(path)
    problems: list[Problem] = []
    origin_of: dict[str, str] = {}
    for origin, raw in read_rows(path, split):
        problem = _problem(raw, origin, default_source=path.stem)
        if problem.id in origin_of:
            raise DataError(
                f"{origin}: the same problem as {origin_of[problem.id]} (source '{problem.source}' and messages are "
                "equal); expected each problem once: delete one, or raise the source's repeat"
            )
        origin_of[problem.id] = origin
        problems.append(problem)
    if not problems:
        raise DataError(f"{path}: holds no problems; expected at least one row")
    if verifiers is not None:
        check_ground_truths(problems, verifiers)
    return problems


def read_problem(raw: Any, origin: str, default_source: str) -> Problem:
    """The problem of one decoded row; ``origin`` is what messages name it by. Raises DataError."""
    return _problem(raw, origin, default_source)


def check_ground_truths(problems: Iterable[Problem], verifiers: Mapping[str, Verifier]) -> None:
    """Raise DataError for the first problem whose ability has no verifier or whose ground truth it cannot use."""
    for problem in problems:
        verifier = verifiers.get(problem.ability)
        if verifier is None:
            known = ", ".join(sorted(verifiers)) or "none"
            raise DataError(f"{problem.origin}: field 'ability': found '{problem.ability}', expected one of: {known}")
        try:
            verifier.check_ground_truth(problem)
        except ValueError as error:
            raise DataError(f"{problem.origin}: field 'ground_truth': {error}") from None


def filter_by_difficulty(problems: Sequence[Problem], model: str) -> list[Problem]:
    """The problems that ``model`` neither always solved nor never (failures other than 0 and 16).

    Raises DataError for a problem at which that model was not measured, naming the models that were, and when
    nothing is left.
    """
    kept = []
    for problem in problems:
        if model not in problem.difficulty:
            measured = ", ".join(sorted(problem.difficulty)) or "none"
            raise DataError(
                f"{problem.origin}: field 'extra_info.model_difficulty': no entry for '{model}' (measured: "
                f"{measured}); expected its failures in {DIFFICULTY_TRIES} tries; drop "
                "data.difficulty_model or name a measured model"
            )
        if problem.difficulty[model] not in (0, DIFFICULTY_TRIES):
            kept.append(problem)
    if not kept:
        raise DataError(
            f"difficulty filter for '{model}' leaves none of {len(problems)} problems: at each it failed 0 or "
            f"{DIFFICULTY_TRIES} of {DIFFICULTY_TRIES} tries"
        )
    return kept


def problem_id(source: str, messages: Sequence[Message]) -> str:
    """A stable id: the first 64 bits, in hex, of the SHA-256 of source and messages."""
    text = json.dumps([source, [[message.role, message.content] for message in messages]], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_HEX_DIGITS]


def _problem(raw: Any, origin: str, default_source: str) -> Problem:
    layout = detect_layout(raw) if isinstance(raw, dict) else None
    if layout not in (None, "skywork", "plain"):
        return _of_another_layout(raw, origin, default_source)
    row = parse_row(raw, origin)
    if isinstance(row, PlainRow):
        source, rows, field = row.source or default_source, row.messages(), "answer"
        try:
            ground_truth = row.ground_truth()
        except ValueError as error:
            raise DataError(f"{origin}: field 'answer': {error}") from None
        difficulty: Mapping[str, int | None] = {}
    else:
        source, rows, field = row.data_source, row.prompt, "reward_model.ground_truth"
        ground_truth = row.reward_model.ground_truth
        difficulty = row.extra_info.model_difficulty or {}
    _check_is_json(ground_truth, field, origin)
    messages = tuple(Message(message.role, message.content) for message in rows)
    return Problem(
        id=problem_id(source, messages),
        source=source,
        ability=row.ability,
        messages=messages,
        ground_truth=ground_truth,
        difficulty={
            model: _checked_failures(model, count, origin) for model, count in difficulty.items() if count is not None
        },
        origin=origin,
    )


def _of_another_layout(raw: Any, origin: str, set_name: str) -> Problem:
    row = read_published(raw, "auto", origin)
    for what, value in (("statement", row.statement), ("answer or tests", row.ground_truth)):
        if not value:
            raise DataError(f"{origin}: has no {what}; expected one in every row (or1 data build leaves such rows out)")
    source = f"{set_name}_{row.source}" if row.source else set_name
    messages = (Message("user", row.statement + row.instructions),)
    return Problem(
        problem_id(source, messages), source, row.ability, messages, row.ground_truth, row.difficulty, origin
    )


def _checked_failures(model: str, failures: int, origin: str) -> int:
    if not 0 <= failures <= DIFFICULTY_TRIES:
        raise DataError(
            f"{origin}: field 'extra_info.model_difficulty.{model}': found {failures}, expected the number of "
            f"failures in {DIFFICULTY_TRIES} tries, 0..{DIFFICULTY_TRIES}"
        )
    return failures


def _check_is_json(ground_truth: str, field: str, origin: str) -> None:
    try:
        decoded = from_json(ground_truth, allow_inf_nan=False)
    except ValueError as error:
        raise DataError(
            f"{origin}: field '{field}': not JSON ({error}), found {shown(ground_truth)}; expected a string that "
            'holds a JSON list of answers, such as ["15625"], or the JSON object of a code problem\'s tests'
        ) from None
    if not isinstance(decoded, list | dict):
        raise DataError(
            f"{origin}: field '{field}': found the JSON of a {type(decoded).__name__}, {shown(ground_truth)}; "
            'expected that of a list of answers, such as ["15625"], or of an object of tests'
        )
