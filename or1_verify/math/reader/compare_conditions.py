"""Compares what gold and answer say about their letters: where a formula holds, which numbers are meant.

If both sides say something about a letter, both must say the same. An answer may leave out the gold's condition, but
not add a restriction. Either side may leave out that a parameter runs over the integers or the reals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from or1_verify.math.reader.answer_types import (
    Conditional,
    NumberSet,
    Reading,
    Relation,
    SetBuilder,
    Several,
    Words,
)
from or1_verify.math.reader.expression_tree import Node, number_node, symbols
from or1_verify.math.reader.intervals import Interval, covered, names_of, same_ranges
from or1_verify.math.reader.quantity import Quantity
from or1_verify.math.reader.words import NAMING, NEUTRAL, change_nothing

Said = dict[frozenset[str], tuple[Reading, ...]]
"""The conditions of an answer: the letters that they are about -> the conditions."""

_INTEGERS = NumberSet("Z")
_REALS = NumberSet("R")
_UNKNOWN = re.compile(r"[a-z]|\\[a-z]+ ")


def with_conditions(value: Reading, conditions: Sequence[Reading]) -> Reading:
    """Return ``value`` with its conditions. An inequality of x with the condition ``x \\in Z`` becomes a set."""
    kept = []
    for condition in conditions:
        domain, (letter, *more) = number_set(condition), sorted(names_of(condition)) or [""]
        ranged = None if domain is None or more or not letter else _ranged(value, letter)
        if ranged is None or domain is None:
            kept.append(condition)
        elif domain != _REALS:
            value = SetBuilder(letter, domain.name, ranged)
    if isinstance(value, Conditional):
        return Conditional(value.value, (*value.conditions, *kept)) if kept else value
    return Conditional(value, tuple(kept)) if kept else value


def _ranged(value: Reading, letter: str) -> Reading | None:
    """Return a range of the letter as a condition: an interval becomes ``letter \\in ...``. None for other values."""
    spans = None if isinstance(value, SetBuilder) else covered(value)
    if spans is None or names_of(value):
        return value if spans is not None and names_of(value) == {letter} else None
    if any(letter in symbols(end) for span in spans for end in (span.low, span.high)):
        return None
    return Relation(("in",), (Quantity(Node("sym", name=letter)), value), (letter, ""))


def number_set(condition: Reading) -> NumberSet | None:
    """Return the number set that a condition names, such as Z for ``k \\in Z``; None if it names none."""
    inside = condition.sides[1] if isinstance(condition, Relation) and condition.operators == ("in",) else None
    return inside if isinstance(inside, NumberSet) else None


def said(reading: Reading, other: Reading) -> Said:
    """Return a reading's conditions by their letters. A bound on a letter replaces the letter's number set Z or R."""
    by_names: dict[frozenset[str], list[Reading]] = {}
    for condition in reading.conditions if isinstance(reading, Conditional) else ():
        by_names.setdefault(names_of(condition), []).append(condition)
    indices = _indices(reading) | _indices(other)
    for names, stated in by_names.items():
        bounds = [condition for condition in stated if number_set(condition) not in (_INTEGERS, _REALS)]
        by_names[names] = bounds or stated[:1]
        if len(bounds) == 1 and names <= indices and (domain := _counted(bounds[0])):
            by_names[names] = [Relation(("in",), (Quantity(Node("sym", name=min(names))), domain), (min(names), ""))]
    return {names: tuple(stated) for names, stated in by_names.items()}


def _indices(reading: Reading) -> set[str]:
    """Return the letters that index a sequence and so are integers: n for ``a_n = ...``."""
    value = reading.value if isinstance(reading, Conditional) else reading
    return set(re.findall(r"_\{?([a-z])\}?", value.heads[0])) if isinstance(value, Relation) else set()


def _counted(bound: Reading) -> NumberSet | None:
    """Return the number set to which a bound restricts an integer: Z+ for ``n >= 1``, N0 for ``n >= 0``, else None."""
    for low, name in ((1, "Z+"), (0, "N0")):
        spans = covered(bound)
        if spans and same_ranges(spans, (Interval(number_node(low), Node("infty"), True, False),)):
            return NumberSet(name)
    return None


def agree_where_one_is_silent(gold: Said, answer: Said, values: tuple[Reading, Reading]) -> bool:
    """Return whether conditions that only one side states leave the meaning of gold and answer the same."""
    bounded = [{names for names, stated in side.items() if not _only_number_sets(stated)} for side in (gold, answer)]
    if bounded[0] and bounded[1] and bounded[0] != bounded[1]:
        return False
    for side in (gold, answer):
        for names in side.keys() - (answer if side is gold else gold).keys():
            if not _is_real(side[names]) and any(map(_is_order, values)) and names & (names_of(values[0])):
                return False  # x > y for integers x
    return not any(_narrows(names, answer[names], values) for names in answer.keys() - gold.keys())


def _only_number_sets(stated: Sequence[Reading]) -> bool:
    return all(number_set(condition) is not None for condition in stated)


def _is_real(stated: Sequence[Reading]) -> bool:
    return all(number_set(condition) == _REALS for condition in stated)


def _is_order(value: Reading) -> bool:
    return isinstance(value, Relation) and bool(set(value.operators) & {"<", "<=", ">", ">=", "!="})


def _narrows(names: frozenset[str], stated: Sequence[Reading], values: tuple[Reading, Reading]) -> bool:
    r"""Return whether a condition that the gold lacks restricts the answer: ``x = 0``, a bound on k in ``k\pi``."""
    head, tree = _formula(values[1])
    if tree is not None and not names <= {head, *symbols(tree)}:
        return True  # 9 for n = 3
    if any(map(_is_point, stated)):
        return any(names & {head, *symbols(tree)} for head, tree in map(_formula, values) if tree is not None)
    if words := [word for one in stated for word in _words(one)]:
        number = tree is not None and not symbols(tree)
        return not change_nothing(words, _HARMLESS if names else NEUTRAL - {"possible"} if number else {"real"})
    domain = number_set(stated[0])
    if domain not in (None, _REALS) and names <= set("xyz") and any(names <= _inside(value) for value in values):
        return True
    if domain in (_INTEGERS, _REALS):
        return domain == _REALS and names <= set("klmn")
    if domain is None:
        return any(isinstance(bound, Relation) and bound.is_inequality for bound in stated)
    heads = [head for head, _ in map(_formula, values) if head]
    return bool(heads) and all(_UNKNOWN.fullmatch(head) and head not in names for head in heads)


_HARMLESS = NAMING | {"arbitrary", "fixed", "given", "positive", "natural", "real", "complex", "constants", "non-zero"}


def _words(condition: Reading) -> list[str]:
    last = condition.sides[-1] if isinstance(condition, Relation) else condition
    return last.text.split() if isinstance(last, Words) else []


def _is_point(condition: Reading) -> bool:
    """Return whether a condition lists single values, as ``x = 0`` or ``x \\in \\{0, 1\\}`` does."""
    if not isinstance(condition, Relation):
        return False
    inside = condition.sides[-1]
    return condition.operators == ("=",) or (isinstance(inside, Several) and inside.brackets == "{}")


def _inside(value: Reading) -> frozenset[str]:
    """Return the letters in a value's expressions. A side that is a single letter, x in ``x = 2k``, is left out."""
    sides = value.sides if isinstance(value, Relation) else (value,)
    trees = [side.tree for side in sides if isinstance(side, Quantity) and side.tree.op != "sym"]
    return frozenset().union(*map(symbols, trees))


def _formula(value: Reading) -> tuple[str, Node | None]:
    """Return (name, expression): ("x", 2k) for ``x = 2k``, ("", 2k) for ``2k``. The expression may be None."""
    if isinstance(value, Relation) and value.operators == ("=",):
        last = value.sides[1]
        return value.heads[0], last.tree if isinstance(last, Quantity) else None
    return "", value.tree if isinstance(value, Quantity) else None


def parameter(gold: Said, answer: Said) -> str:
    """Return the only letter that both sides declare an integer and restrict no further; "" if there is none."""
    both = [
        names
        for names in gold.keys() & answer.keys()
        if len(names) == 1 and all([number_set(one) for one in side[names]] == [_INTEGERS] for side in (gold, answer))
    ]
    return min(both[0]) if len(both) == 1 else ""
