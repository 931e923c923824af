"""Decides which letters an answer may choose freely: parameters, function arguments, constants of integration."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from or1_verify.math.reader.normalization import Token, Unreadable, tokens

_INTEGER = r"(?<![A-Za-z])([a-z])\s*\\in\s*\\mathbb\s*\{\s*[ZN]\s*\}"
_ARGUMENT = r"^[A-Za-z]\w*\s*\(\s*([a-z])\s*\)\s*="
_COUNTERS = {"k", "l", "m", "n"}
_ANGLES = re.compile(r"(?:[a-xz]|\\[a-z]+ ) ?=.*(?:[klmn] ?\\pi|\\pi ?[klmn](?! ?\^))")
_TUPLE_OF_REAL = r"^\(.*\)\s*[,(]\s*([a-z])\s*\\in\s*\\mathbb\s*\{\s*R\s*\}"
_Rename = Callable[[str, str], tuple[str, str] | None]


def renaming(gold: str, answer: str) -> Callable[[list[Token]], list[Token]] | None:
    """Return a function that renames a letter of the answer to the gold's letter; None if nothing is to be renamed."""
    declared = (partial(_declared, pattern) for pattern in (_INTEGER, _ARGUMENT, _TUPLE_OF_REAL))
    rules: tuple[_Rename, ...] = (*declared, _integers, lambda a, b: _integers(b, a), _reals, _constants)
    for rule in rules:
        names = rule(gold, answer)
        if names and names[0] != names[1]:
            swap = {names[0]: names[1], names[1]: names[0]}
            return lambda items: [
                Token(token.kind, swap.get(token.text, token.text), token.spaced) if token.kind == "symbol" else token
                for token in items
            ]
    return None


def _declared(pattern: str, gold: str, answer: str) -> tuple[str, str] | None:
    """Return the letters (in gold, in answer) that ``pattern`` finds; None unless it finds one letter in each text."""
    names = [set(re.findall(pattern, text)) for text in (gold, answer)]
    return (names[0].pop(), names[1].pop()) if len(names[0]) == len(names[1]) == 1 else None


def _reals(gold: str, answer: str) -> tuple[str, str] | None:
    """Return the parameters (in gold, in answer) of a point such as ``(t, 2t)``, if only the gold says ``t \\in R``.

    The answer's parameter is its only letter that the gold lacks. None if there is no such letter.
    """
    declared, own = re.findall(_TUPLE_OF_REAL, gold), _symbols(answer) - _symbols(gold)
    lone = declared and answer.startswith("(") and len(own) == 1 and declared[0] not in _symbols(answer)
    return (declared[0], own.pop()) if lone else None


def _constants(gold: str, answer: str) -> tuple[str, str] | None:
    """Return the constants of integration (in gold, in answer), for a gold in x or t; None if there are none."""
    ours, theirs = _symbols(gold), _symbols(answer)
    constants, others = ours - theirs, theirs - ours
    named = re.search(r"C\s*(?:\(|[^=]*=)|[ABD-Z]", gold) if constants == {"C"} else not re.search(r"c_", gold)
    if constants not in ({"C"}, {"c"}) or named or not ours & {"x", "t"} or len(others) != 1:
        return None
    return (constants.pop(), others.pop()) if others <= {"C", "c", "K", "k", "A"} else None


def _symbols(cleaned: str) -> set[str]:
    try:
        return {token.text for token in tokens(cleaned) if token.kind == "symbol"}
    except Unreadable:
        return set()


def _integers(one: str, other: str) -> tuple[str, str] | None:
    """Return the letters (in ``one``, in ``other``) that stand for the same integer, or None.

    ``one`` declares its letter (``k \\in Z``); ``other`` declares none, and has just one of k, l, m, n. The k of
    ``x = k\\pi``, a solution of a trigonometric equation, counts as declared. Neither letter may be in both texts.
    """
    names = set(re.findall(_INTEGER, one))
    if re.search(_INTEGER, other):
        return None
    if _ANGLES.match(one) and len(_symbols(one)) <= 2:  # no other letter than the angle's
        names |= _symbols(one) & _COUNTERS
    free = _symbols(other) & _COUNTERS
    alone = len(names) == len(free) == 1 and not names & _symbols(other) and not free & _symbols(one)
    return (names.pop(), free.pop()) if alone else None
