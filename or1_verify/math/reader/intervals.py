r"""Reads sets of real numbers in any notation: intervals and unions, inequalities, ``x \ne 1``, ``\mathbb{R}``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from or1_verify.math.reader.answer_types import (
    Dots,
    NumberSet,
    Reading,
    Relation,
    SetBuilder,
    Several,
    Union,
)
from or1_verify.math.reader.expression_equality import same
from or1_verify.math.reader.expression_tree import Node, number_node, symbols
from or1_verify.math.reader.numeric_value import rational, real
from or1_verify.math.reader.quantity import Quantity
from or1_verify.math.reader.several_values import spread

_INFINITY = Node("infty")
_MINUS_INFINITY = Node("neg", (_INFINITY,))
_ZERO = Node("num", name="0")


@dataclass(frozen=True)
class Interval:
    low: Node
    high: Node
    low_closed: bool
    high_closed: bool


_MAX_MEMBERS = 64
_SHOWN = 3
_NUMBER_SETS = {
    "R": (Interval(_MINUS_INFINITY, _INFINITY, False, False),),
    "R+": (Interval(_ZERO, _INFINITY, False, False),),
}


def covered(reading: Reading) -> tuple[Interval, ...] | None:
    """Return the intervals that a reading covers, the lowest first; None if the reading is no set of reals."""
    if isinstance(reading, NumberSet):
        return _NUMBER_SETS.get(reading.name)
    if isinstance(reading, Union):
        return _joined([_part(part) for part in reading.parts])
    reading = spread(reading)
    if isinstance(reading, Several):
        if reading.brackets in ("()", "[]", "(]", "[)"):
            return _bracketed(reading)
        if reading.brackets == "" and all(isinstance(item, Relation) for item in reading.items):
            return _alternatives(reading)
        return None
    if isinstance(reading, SetBuilder):
        return conditioned(reading) if reading.domain in ("", "R") else None
    return _inequality(reading) if isinstance(reading, Relation) else None


def conditioned(built: SetBuilder) -> tuple[Interval, ...] | None:
    """Return the intervals that a set's condition allows, whatever its domain; None if the variable is not bounded."""
    return covered(built.condition) if built.variable in names_of(built.condition) else None


def members(built: SetBuilder) -> Several | None:
    """Return the members of a finite set of integers: -1, 0, 1 for ``\\{x \\in Z : -1 <= x <= 1\\}``; else None."""
    spans = conditioned(built)
    if built.domain not in ("Z", "N", "Z+") or spans is None:
        return None
    integers: list[int] = []
    for span in spans:
        ends = real(span.low), real(span.high)
        if ends[0] is None or ends[1] is None or not ends[1] - ends[0] < _MAX_MEMBERS:
            return None
        inside = range(math.ceil(ends[0]), math.floor(ends[1]) + 1)
        integers += [n for n in inside if (n > ends[0] or span.low_closed) and (n < ends[1] or span.high_closed)]
    if built.domain == "N" and 0 in integers:
        return None  # whether N begins at 0 is not known
    counted = [n for n in integers if n > 0 or built.domain == "Z"]
    return Several(tuple(Quantity(number_node(n)) for n in counted), "{}") if counted else None


def counted_on(reading: Reading) -> tuple[Interval, ...] | None:
    r"""Return [3, oo) for ``\{3, 4, 5, \ldots\}``, integers with an ellipsis at one end; None for other readings."""
    if not isinstance(reading, Several) or reading.brackets != "{}":
        return None
    shown = [rational(item.whole) for item in reading.items if isinstance(item, Quantity) and item.unit is None]
    dots = [index for index, item in enumerate(reading.items) if isinstance(item, Dots)]
    numbers = [value for value in shown if value is not None]
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) < _SHOWN or len(numbers) + 1 != len(reading.items) or steps not in ({1}, {-1}):
        return None
    if dots not in ([0], [len(numbers)]):
        return None
    end = number_node(numbers[-1] if dots == [0] else numbers[0])
    upwards = (dots == [0]) == (steps == {-1})
    return (Interval(end, _INFINITY, True, False) if upwards else Interval(_MINUS_INFINITY, end, False, True),)


def of_integers(spans: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Return an integer variable's spans with closed integer ends: ``n > 2`` begins at 3. Ends with letters stay."""
    return tuple(
        Interval(low, high, low_closed, high_closed)
        for span in spans
        for low, low_closed in (_integer_end(span.low, span.low_closed, 1),)
        for high, high_closed in (_integer_end(span.high, span.high_closed, -1),)
    )


def _integer_end(end: Node, closed: bool, inwards: int) -> tuple[Node, bool]:
    value = rational(end)
    if value is None:
        return end, closed
    if value.denominator == 1:
        return (end, True) if closed else (number_node(value + inwards), True)
    return number_node(math.ceil(value) if inwards > 0 else math.floor(value)), True


def names_of(reading: Reading) -> frozenset[str]:
    """Return the variables in the inequalities of a reading."""
    if isinstance(reading, Relation):
        trees = [side.whole for side in reading.sides if isinstance(side, Quantity)]
        letters = {node.name for tree in trees for node in (tree, *tree.args[: _is_abs(tree)]) if node.op == "sym"}
        return frozenset(({*reading.heads} | letters) - {"", "e", "i"} or letters)
    parts = reading.items if isinstance(reading, Several) else reading.parts if isinstance(reading, Union) else ()
    return frozenset().union(*map(names_of, parts))


def same_ranges(left: tuple[Interval, ...], right: tuple[Interval, ...]) -> bool:
    return len(left) == len(right) and all(
        a.low_closed == b.low_closed and a.high_closed == b.high_closed and same(a.low, b.low) and same(a.high, b.high)
        for a, b in zip(left, right, strict=True)
    )


def _position(tree: Node) -> float:
    value = real(tree)
    assert value is not None
    return float(value)


def _part(reading: Reading) -> tuple[Interval, ...] | None:
    if isinstance(reading, Several) and reading.brackets == "{}":
        points = [item.whole for item in reading.items if isinstance(item, Quantity)]
        return (
            tuple(Interval(point, point, True, True) for point in points) if len(points) == len(reading.items) else None
        )
    return covered(reading)


def _joined(parts: list[tuple[Interval, ...] | None]) -> tuple[Interval, ...] | None:
    """Return the union of all parts, with touching intervals joined unless ends are letters; None if a part is None."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return _combined(known, lambda _, sets: set().union(*sets)) or tuple(span for part in known for span in part)


def _combined(
    parts: Sequence[tuple[Interval, ...] | None], combine: Callable[[set[int], list[set[int]]], set[int]]
) -> tuple[Interval, ...] | None:
    """Return what ``combine`` makes of the whole line and the parts; None if a part is None or an end has a letter.

    ``combine`` works on sets of integers. The ends cut the line into points and gaps: the k-th end is the integer 2k,
    and the gap behind it 2k + 1.
    """
    ends = [_MINUS_INFINITY]
    sets: list[set[int]] = []
    known = [part for part in parts if part is not None]
    given = [end for spans in known for span in spans for end in (span.low, span.high)]
    if len(known) < len(parts) or any(real(end) is None for end in given):
        return None
    for end in sorted((*given, _INFINITY), key=_position):
        if not same(ends[-1], end):
            ends.append(end)
    for spans in known:
        numbers: set[int] = set()
        for span in spans:
            low, high = (next(k for k, other in enumerate(ends) if same(other, end)) for end in (span.low, span.high))
            numbers.update(range(2 * low + (not span.low_closed), 2 * high + span.high_closed))
        sets.append(numbers)
    runs: list[list[int]] = []
    for number in sorted(combine(set(range(1, 2 * len(ends) - 2)), sets)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return tuple(
        Interval(ends[first // 2], ends[(last + 1) // 2], first % 2 == 0, last % 2 == 0) for first, last in runs
    )


def _bracketed(group: Several) -> tuple[Interval, ...] | None:
    if len(group.items) != 2 or not all(isinstance(item, Quantity) and item.unit is None for item in group.items):
        return None
    low, high = (item.whole for item in group.items if isinstance(item, Quantity))
    ends = real(low), real(high)
    if ends[0] is not None and ends[1] is not None and not ends[0] < ends[1]:
        return None
    return (Interval(low, high, group.brackets[0] == "[", group.brackets[1] == "]"),)


def _alternatives(group: Several) -> tuple[Interval, ...] | None:
    relations = [item for item in group.items if isinstance(item, Relation)]
    excluded = [point for relation in relations if (point := _excluded_value(relation)) is not None]
    if group.joined_by != "or" and len(excluded) == len(relations):
        return _reals_without(tuple(excluded))
    if group.joined_by == "and" or (group.joined_by == "," and excluded):
        return _where_all_hold(relations)
    points = [_single_point(relation) if group.joined_by == "or" else None for relation in relations]
    if all(points) or not frozenset.intersection(*map(names_of, relations)):
        return None  # x = 1 or x = 2 is a list, and x < 1 or y > 2 no set of numbers
    return _joined([point or _inequality(relation) for point, relation in zip(points, relations, strict=True)])


def _excluded_value(relation: Relation) -> Reading | None:
    sides = relation.sides if relation.operators == ("!=",) else ()
    letters = [isinstance(side, Quantity) and side.whole.op == "sym" for side in sides]
    return sides[not letters[1]] if any(letters) else None


def _where_all_hold(relations: list[Relation]) -> tuple[Interval, ...] | None:
    """Return where all ``relations`` of one variable hold (``x > -3, x \\ne -1``); None if they hold nowhere."""
    if len(frozenset().union(*map(names_of, relations))) != 1:
        return None
    return _combined([*map(_inequality, relations)], lambda line, sets: line.intersection(*sets)) or None


def _single_point(relation: Relation) -> tuple[Interval, ...] | None:
    value = relation.sides[-1]
    if relation.operators != ("=",) or not relation.heads[0] or not isinstance(value, Quantity):
        return None
    return (Interval(value.whole, value.whole, True, True),) if real(value.whole) is not None else None


def _reals_without(points: tuple[Reading, ...]) -> tuple[Interval, ...] | None:
    group = spread(Several(points))
    points = group.items if isinstance(group, Several) else points
    parts = [(Interval(p.whole, p.whole, True, True),) if isinstance(p, Quantity) else covered(p) for p in points]
    return _combined(parts, lambda line, sets: line.difference(*sets))


def _inequality(relation: Relation) -> tuple[Interval, ...] | None:
    """Return where ``1 < x <= 2``, ``3 > x``, ``|x| <= 1``, ``x \\ne 1`` or ``x \\in [0, 1]`` holds."""
    if relation.operators == ("in",) and relation.heads[0]:
        return covered(relation.sides[1])
    if (excluded := _excluded_value(relation)) is not None:
        return _reals_without((excluded,))
    sides = [side.whole for side in relation.sides if isinstance(side, Quantity)]
    if len(sides) != len(relation.sides):
        return None
    ordered = relation.ascending()
    if ordered is None or (len(sides) == 3 and not relation.heads[1]):  # 1 < 2x < 4 says nothing of x between 1 and 4
        return None
    ascending = [side.whole for side in ordered[1] if isinstance(side, Quantity)]
    return _ascending(ascending, [operator == "<=" for operator in ordered[0]])


def _ascending(sides: list[Node], closed: list[bool]) -> tuple[Interval, ...] | None:
    if len(sides) == 3:
        low, middle, high = sides
        if not symbols(middle) or symbols(middle) & (symbols(low) | symbols(high)):
            return None
        return (Interval(low, high, closed[0], closed[1]),)
    if len(sides) != 2:
        return None
    left, right = sides
    if _is_abs(left) and _is_positive(right):
        return (Interval(Node("neg", (right,)), right, closed[0], closed[0]),)
    if _is_abs(right) and _is_positive(left):
        below = Interval(_MINUS_INFINITY, Node("neg", (left,)), False, closed[0])
        return below, Interval(left, _INFINITY, closed[0], False)
    if left.op == "sym" and not symbols(right):
        return (Interval(_MINUS_INFINITY, right, False, closed[0]),)
    if right.op == "sym" and not symbols(left):
        return (Interval(left, _INFINITY, closed[0], False),)
    return None


def _is_abs(tree: Node) -> bool:
    return tree.op == "abs" and tree.args[0].op == "sym"


def _is_positive(tree: Node) -> bool:
    value = real(tree)
    return value is not None and value > 0
