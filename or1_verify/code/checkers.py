"""Compares a submission's output or result with the expected one, outside the sandbox, by a rule that the data names.

docs/code_verifier.md lists the values of a ground truth's key ``checker``; checkers that are programs run in
``code.checker_programs``. A sandbox gives bytes or plain data. Output that cannot be read counts as different.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

FLOAT_TOLERANCE = 1e-6
"""Tolerance, absolute or relative, of the checker ``float`` if a problem gives none, as in most online judges."""

_MAX_DECIMAL_CHARS = 4000  # of one token: a Decimal of millions of digits would take us too long

_MAX_HEX_DIGITS = 25_000  # of a call's result: decimal conversion takes quadratic time

PROGRAM_KINDS = frozenset({"python", "testlib"})


@dataclass(frozen=True, slots=True)
class Checker:
    """The checker of one problem: its kind, and the validated parameters of this kind."""

    kind: str = "lines"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    of: Checker | None = None

    @property
    def is_program(self) -> bool:
        return self.kind in PROGRAM_KINDS


def parse_checker(value: Any, calls: bool) -> Checker:
    """Return the checker under a ground truth's key ``checker``; by default "json" for ``calls``, else "lines".

    Raises ValueError with what was expected.
    """
    if value is None:
        return Checker("json" if calls else "lines")
    named = {"kind": value} if isinstance(value, str) else value
    known = {**(_CALL_CHECKS if calls else _TEXT_CHECKS), "any_of": None, **dict.fromkeys(PROGRAM_KINDS)}
    if not isinstance(named, dict) or named.get("kind") not in known:
        what = "calls" if calls else "standard input and output"
        raise ValueError(f"checker: found {value!r:.100}, expected for {what} one of: {', '.join(sorted(known))}")
    kind = named["kind"]
    parameters = {name: item for name, item in named.items() if name not in ("kind", "of")}
    allowed = _PARAMETERS.get(kind, frozenset())
    if unknown := sorted(set(parameters) - allowed):
        raise ValueError(f"checker {kind}: unknown key {unknown[0]!r}, expected of: {sorted(allowed) or 'none'}")
    for name in ("tolerance", "absolute", "relative"):
        number = parameters.get(name, 1.0)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ValueError(f"checker {kind}: {name}: found {number!r:.100}, expected a number of at least 0")
    for name, wanted in (("source", str), ("files", dict)):
        if not isinstance(parameters.get(name, wanted()), wanted):
            raise ValueError(f"checker {kind}: {name}: expected a {wanted.__name__}")
    if kind in PROGRAM_KINDS and not parameters.get("source"):
        raise ValueError(f"checker {kind}: expected its 'source'")
    of = parse_checker(named.get("of"), calls) if kind == "any_of" else None
    if of is not None and (of.is_program or of.kind == "any_of"):
        raise ValueError(f"checker any_of: of: found {of.kind!r}, expected a checker that compares by itself")
    return Checker(kind, parameters, of)


def text_matches(output: bytes, expected: Any, checker: Checker) -> bool:
    """Return whether standard output matches the expected text. For the checker any_of, ``expected`` lists texts."""
    if checker.of is not None:
        return any(text_matches(output, one, checker.of) for one in expected)
    check = _TEXT_CHECKS[checker.kind]
    return check(output.decode("utf-8", "replace"), expected, checker.parameters)


def value_matches(result: Any, expected: Any, checker: Checker) -> bool:
    """Return whether the encoded result of a call (``code.codec``) matches the expected value."""
    try:
        if checker.of is not None:
            return any(value_matches(result, one, checker.of) for one in expected)
        return _CALL_CHECKS[checker.kind](result, expected, checker.parameters)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        return False


def lines_match(text: str, expected: str, _: Mapping[str, Any]) -> bool:
    """Return whether two stripped texts have the same tokens in each line. "1.0" and "1" are the same number.

    This is the rule of LiveCodeBench's harness, except that white space within a line never matters.
    """
    return _as_many_lines(text, expected) and all(map(_tokens_match, _line_tokens(text), _line_tokens(expected)))


def _tokens_match(result: list[str], expected: list[str]) -> bool:
    if len(result) != len(expected) or result == expected:
        return result == expected
    pairs = zip(result, expected, strict=True)
    return all((number := _decimal(token)) is not None and number == _decimal(wanted) for token, wanted in pairs)


def _decimal(token: str) -> Decimal | None:
    """Return the finite number that a token spells, or None. A token that is not ASCII is no number."""
    if len(token) > _MAX_DECIMAL_CHARS or not token.isascii() or "_" in token:
        return None
    try:
        number = Decimal(token)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _floats_match(text: str, expected: str, parameters: Mapping[str, Any]) -> bool:
    found_tokens, expected_tokens = text.split(), expected.split()
    return len(found_tokens) == len(expected_tokens) and all(
        token == wanted or _close(_float(token), _float(wanted), parameters)
        for token, wanted in zip(found_tokens, expected_tokens, strict=True)
    )


def _float(token: str) -> float | None:
    number = _decimal(token)
    return None if number is None else float(number)


def _close(result: float | int | None, expected: float | int | None, parameters: Mapping[str, Any]) -> bool:
    if result is None or expected is None or not math.isfinite(result):
        return False
    default = parameters.get("tolerance", FLOAT_TOLERANCE)
    if {"absolute", "relative"} & set(parameters):
        default = 0.0
    absolute, relative = parameters.get("absolute", default), parameters.get("relative", default)
    return abs(result - expected) <= max(absolute, relative * abs(expected))


def _unordered_lines(text: str, expected: str, _: Mapping[str, Any]) -> bool:
    return _as_many_lines(text, expected) and sorted(_line_tokens(text)) == sorted(_line_tokens(expected))


def _as_many_lines(text: str, expected: str) -> bool:
    """Return whether two texts have the same number of lines. Counting is cheaper than splitting millions of lines."""
    return text.strip().count("\n") == expected.strip().count("\n")


def _line_tokens(text: str) -> Iterator[list[str]]:
    return map(str.split, text.strip().split("\n"))


def _same_multiset(encoded: Any, expected: Any, depth: int) -> bool:
    result = as_json(encoded, sets=True)
    if isinstance(result, list) and isinstance(expected, list) and len(result) != len(expected):
        return False  # before millions of items are sorted
    return _multiset(result, depth) == _multiset(expected, depth)


def _multiset(value: Any, depth: int) -> str:
    """Return a value as JSON, with the lists of its ``depth`` outer levels sorted; -1 sorts the lists of all levels."""
    if not isinstance(value, list) or depth == 0:
        return json.dumps(value, sort_keys=True)
    return "[" + ",".join(sorted(_multiset(item, depth - 1) for item in value)) + "]"


def as_json(encoded: Any, sets: bool = False) -> Any:
    """Return an encoded value as plain JSON: tuples (and sets, if ``sets`` is true) become lists, keys become text."""
    if isinstance(encoded, list):
        return [as_json(item, sets) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((tag, value),) = encoded.items()
    if tag == "dict":
        return {_key(as_json(key, sets)): as_json(item, sets) for key, item in value}
    if tag == "int":
        if len(value) > _MAX_HEX_DIGITS:
            raise ValueError("an integer of too many digits")
        return int(value, 16)
    if tag in ("tuple", "list_node", "tree_node") or (sets and tag in ("set", "frozenset")):
        return [as_json(item, sets) for item in value]
    raise TypeError(f"a {tag} is not a JSON value")


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _equal(result: Any, expected: Any, tolerance: Mapping[str, Any] | None = None) -> bool:
    """Return whether two JSON values are equal; True does not equal 1, and 3.0 equals 3.

    Without a ``tolerance`` floats are compared by ``==``, as in LiveCodeBench's harness.
    """
    if isinstance(expected, bool) or isinstance(result, bool):
        return expected is result
    if isinstance(expected, int | float) and isinstance(result, int | float):
        close = (
            tolerance is not None and float in (type(result), type(expected)) and _close(result, expected, tolerance)
        )
        return result == expected or close
    if isinstance(expected, list) and isinstance(result, list):
        pairs = zip(result, expected, strict=False)
        return len(expected) == len(result) and all(_equal(left, right, tolerance) for left, right in pairs)
    if isinstance(expected, dict) and isinstance(result, dict):
        return expected.keys() == result.keys() and all(
            _equal(result[key], expected[key], tolerance) for key in expected
        )
    return type(expected) is type(result) and bool(expected == result)


_TEXT_CHECKS: Mapping[str, Callable[[str, str, Mapping[str, Any]], bool]] = {
    "lines": lines_match,
    "exact": lambda text, expected, _: text == expected,
    "tokens": lambda text, expected, _: text.split() == expected.split(),
    "float": _floats_match,
    "unordered_lines": _unordered_lines,
    "unordered_tokens": lambda text, expected, _: sorted(text.split()) == sorted(expected.split()),
}
_CALL_CHECKS: Mapping[str, Callable[[Any, Any, Mapping[str, Any]], bool]] = {
    "json": lambda result, expected, _: _equal(as_json(result), expected),
    "float": lambda result, expected, tolerance: _equal(as_json(result), expected, tolerance),
    "unordered": lambda result, expected, _: _same_multiset(result, expected, 1),
    "nested_unordered": lambda result, expected, _: _same_multiset(result, expected, -1),
}
_PARAMETERS: Mapping[str, frozenset[str]] = {
    "float": frozenset({"tolerance", "absolute", "relative"}),
    "python": frozenset({"source"}),
    "testlib": frozenset({"source", "files"}),
}
