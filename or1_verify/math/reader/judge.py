r"""Judges whether an answer says the same as a gold: reads both, then compares them by their types.

docs/math_verifier.md has the rules and their reasons. The functions raise ``Unreadable`` if gold or answer cannot be
read, unless the texts are equal.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial

from or1_verify.math.reader import special_notations
from or1_verify.math.reader.answer_types import Reading
from or1_verify.math.reader.compare import compare
from or1_verify.math.reader.normalization import Unreadable, clean
from or1_verify.math.reader.numeric_value import rational
from or1_verify.math.reader.parse_answer import read
from or1_verify.math.reader.quantity import Quantity
from or1_verify.math.reader.renamed_letters import renaming
from or1_verify.math.reader.rounding import as_rounded
from or1_verify.math.reader.vectors_and_derivatives import alike

_MAX_CHARS = 2000
_LIST = re.compile(r"[\\{$]*(?:-?[\d./]{1,20}[,;]\s*)+-?[\d./]{1,20}[\\}$]*")
"""Lists of numbers, which may be longer than _MAX_CHARS."""
_POWER = r"(?:\s*\^\s*(?:\d|\{\s*-?\s*\d\s*\}))?"
_BARE_UNIT = re.compile(rf"(.*[\d}}])\s*([mgshlL]|[A-Za-z]+{_POWER}(?:\s*(?:/|\\cdot|)\s*[A-Za-z]+{_POWER})+)")
_IN_BRACKETS = re.compile(r"[\s$]*(?:\\left)?(?:\(|\[|\\\{)[\d,]+(?:\\right)?(?:\)|\]|\\\})[\s$.]*")


Judgement = tuple[bool, str]
"""(whether the answer is right, the types that gold and answer were compared as)."""


def judge(gold: str, answer: str, rounding: bool = False) -> Judgement:
    """Judge ``answer`` by ``gold``. Raises Unreadable if one of them cannot be read.

    With ``rounding``, an exact answer is right if it rounds to a decimal gold (``reader.rounding``).
    """
    if any(len(side) > _MAX_CHARS and not _LIST.fullmatch(side) for side in (gold, answer)):
        raise Unreadable(f"longer than {_MAX_CHARS} characters")
    gold, answer = alike(gold, answer)
    if (said := special_notations.ordinals(gold, answer)) is not None:
        return said, "compared as ordinals"
    cleaned = _cleaned(gold), _cleaned(answer)
    if _squeezed(cleaned[0]) == _squeezed(cleaned[1]) != "":
        return True, "the same text"
    for name, rule in special_notations.RULES:
        if (said := rule(cleaned[0], cleaned[1], partial(_same_value, rounding=rounding))) is not None:
            return said, name
    return _judge_readings(gold, answer, rounding)


def is_readable(gold: str) -> bool:
    """Return whether :func:`judge` can compare answers with this gold."""
    try:
        _reading(gold, True)
    except (Unreadable, RecursionError):
        return bool(special_notations.based(gold))
    return True


def _same_value(gold: str, answer: str, rounding: bool) -> bool:
    try:
        return judge(gold, answer, rounding)[0]
    except Unreadable:
        return False


def _judge_readings(gold: str, answer: str, rounding: bool) -> Judgement:
    """Judge under each way to read commas between digits, as ``1,234`` can be one number or two."""
    rename = renaming(_cleaned(gold), _cleaned(answer))
    failed: Unreadable | None = None
    said: Judgement | None = None
    for gold_groups in _gold_readings(gold):
        for answer_groups in _comma_readings(answer):
            try:
                left = as_rounded(_reading(gold, gold_groups)) if rounding else _reading(gold, gold_groups)
                right = read(clean(answer, answer_groups), rename)
                said = (
                    any(compare(left, way) for way in _ways(left, right)),
                    f"compared as {_name(left)} and {_name(right)}",
                )
            except (Unreadable, RecursionError) as error:
                failed = error if isinstance(error, Unreadable) else Unreadable("nested too deep")
                continue
            if said[0]:
                return said
    bare = _bare_units(gold, answer)
    if bare is not None:
        return bare
    if said is None:
        raise failed or Unreadable("no reading")
    return said


def _bare_units(gold: str, answer: str) -> Judgement | None:
    """Judge with the answer's last letters, m in ``7 m``, read as a unit. Return None unless the gold has a unit."""
    try:
        expected = _reading(gold, True)
        if not isinstance(expected, Quantity) or expected.unit is None:
            return None
        match = _BARE_UNIT.fullmatch(_cleaned(answer))
        if match is None:
            return None
        marked = re.sub(r"(?<!\\)\b[A-Za-z]+", r" «\g<0>» ", match[2])
        return compare(expected, read(match[1] + marked)), "compared as quantities"
    except Unreadable:
        return None


@lru_cache(maxsize=1024)
def _cleaned(text: str) -> str:
    return clean(text)


@lru_cache(maxsize=1024)  # a group's answers share their gold
def _reading(text: str, commas_group: bool) -> Reading:
    return read(clean(text, commas_group))


def _comma_readings(text: str) -> tuple[bool, ...]:
    """Return the ways to read a text's commas: True if ``1,234`` is one number. ``(1,234)`` is always two."""
    if not re.search(r"\d,\d{3}", text):
        return (True,)
    return (False,) if _IN_BRACKETS.fullmatch(text) else (True, False)


def _gold_readings(gold: str) -> tuple[bool, ...]:
    """Return ``_comma_readings(gold)``, but only (True,) if the gold is nothing but ``1,234`` or is in dollars."""
    alone = re.fullmatch(r"[\s$]*\d{1,3}(?:,\d{3})+[\s$]*", gold) or r"\$" in gold
    return (True,) if alone else _comma_readings(gold)


def _ways(gold: Reading, answer: Reading) -> tuple[Reading, ...]:
    """Return the readings of ``answer`` to compare with ``gold``: 25% also as 25, if the gold is a number above 1."""
    if not (isinstance(gold, Quantity) and isinstance(answer, Quantity)) or gold.percent or gold.unit:
        return (answer,)
    plain = gold.tree.op in ("num", "mixed") and (rational(gold.tree) or 0) > 1
    return (answer, replace(answer, percent=False)) if answer.percent and plain else (answer,)


def _squeezed(cleaned: str) -> str:
    """Remove white space except between two numbers or words, and the braces of an exponent of one character."""
    spaced = re.sub(r"([\^_])\{(\w)\}(?!\w)", r"\1\2", re.sub(r"[«»]", " ", cleaned))
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", spaced)


def _name(reading: Reading) -> str:
    return {"Quantity": "a value", "Several": "several values", "Relation": "a relation", "Words": "words"}.get(
        type(reading).__name__, type(reading).__name__.lower()
    )
