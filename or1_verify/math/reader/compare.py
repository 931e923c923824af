"""Compares a gold and an answer, both already parsed, by one rule for each pair of types."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from or1_verify.math.reader.answer_types import (
    Cases,
    Conditional,
    Dots,
    Empty,
    Matrix,
    Modular,
    NumberSet,
    Ratio,
    Reading,
    Relation,
    Restated,
    SetBuilder,
    Several,
    Union,
    Words,
)
from or1_verify.math.reader.compare_conditions import agree_where_one_is_silent, parameter, said
from or1_verify.math.reader.compare_quantities import same_quantity
from or1_verify.math.reader.expression_equality import canonical, fraction, proportional, same
from or1_verify.math.reader.expression_tree import Node, number_node, symbols
from or1_verify.math.reader.intervals import (
    Interval,
    conditioned,
    counted_on,
    covered,
    members,
    names_of,
    of_integers,
    same_ranges,
)
from or1_verify.math.reader.named_values import assignments, same_name
from or1_verify.math.reader.normalization import Unreadable
from or1_verify.math.reader.numerals import decimals, is_numeral
from or1_verify.math.reader.numeric_value import rational, real
from or1_verify.math.reader.quantity import Quantity
from or1_verify.math.reader.several_values import same_links, spread
from or1_verify.math.reader.solution_families import same_family
from or1_verify.math.reader.words import HEDGES, LEAD_INS

_MAX_ITEMS = 200
_LABEL = re.compile(r"[a-z-]{3,}")
_LETTER = re.compile(r"[a-z](?:\([a-z]\))?")


def compare(gold: Reading, answer: Reading) -> bool:
    """Return whether gold and answer are equal by the rules of docs/math_verifier.md.

    Raises Unreadable if they cannot be compared.
    """
    for kind, rule in _WHOLE_RULES:
        if isinstance(gold, kind) or isinstance(answer, kind):
            return rule(gold, answer)
    ranges = covered(gold), covered(answer)
    if ranges[0] is not None and ranges[1] is not None:
        return _same_range(gold, answer, ranges[0], ranges[1])
    if isinstance(gold, SetBuilder) or isinstance(answer, SetBuilder):
        return _same_set(gold, answer)
    if not same_links(gold, answer):
        return False
    is_chain = isinstance(gold, Relation) and len(gold.sides) > 2 and all(gold.heads[:-1]) and not gold.heads[-1]
    if isinstance(gold, Relation) and is_chain and isinstance(answer, Quantity):
        gold = Relation(gold.operators[-1:], gold.sides[-2:], gold.heads[-2:])  # 2 for x = y = 2
    gold, answer = spread(gold), spread(answer)
    for kind, rule in _SPREAD_RULES:
        if isinstance(gold, kind) or isinstance(answer, kind):
            return rule(gold, answer)
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return same_quantity(gold, answer)
    if isinstance(gold, Union) and isinstance(answer, Union):
        return _matched(gold.parts, answer.parts, compare)
    return isinstance(gold, NumberSet) and gold == answer


def _same_restated(gold: Reading, answer: Reading) -> bool:
    """Compare a value in two notations: an answer must be right in both, but may agree with only one of the gold's."""
    if isinstance(answer, Restated):
        return all(compare(gold, way) for way in answer.ways)
    assert isinstance(gold, Restated)
    return any(compare(way, answer) for way in gold.ways)


def _same_conditional(gold: Reading, answer: Reading) -> bool:
    """Compare two formulas and the conditions that both sides state for the same letters."""
    values = (
        gold.value if isinstance(gold, Conditional) else gold,
        answer.value if isinstance(answer, Conditional) else answer,
    )
    ours, theirs = said(gold, answer), said(answer, gold)
    if not all(_matched(ours[names], theirs[names], compare) for names in ours.keys() & theirs.keys()):
        return False
    if not agree_where_one_is_silent(ours, theirs, values):
        return False
    letter = parameter(ours, theirs)
    return compare(*values) or (letter != "" and same_family(*values, letter))


def _same_set(gold: Reading, answer: Reading) -> bool:
    """Compare sets that a condition defines. Raises Unreadable if a condition does not bound the variable."""
    sides = [members(side) or side if isinstance(side, SetBuilder) else side for side in (gold, answer)]
    if not any(isinstance(side, SetBuilder) for side in sides):
        return compare(*sides)
    ranges = [conditioned(side) if isinstance(side, SetBuilder) else counted_on(side) for side in sides]
    if ranges[0] is None or ranges[1] is None:
        raise Unreadable("a set by a condition that is no range")
    domains = {side.domain for side in sides if isinstance(side, SetBuilder)}
    if len(domains) > 1:
        return False
    if domains <= {"Z", "N", "Z+", "N0"}:
        return same_ranges(of_integers(ranges[0]), of_integers(ranges[1]))
    return all(isinstance(side, SetBuilder) for side in sides) and same_ranges(ranges[0], ranges[1])


def _same_words(gold: Reading, answer: Reading) -> bool:
    if not (isinstance(gold, Words) and isinstance(answer, Words)):
        return False
    return _word_key(gold.text) == _word_key(answer.text)


def _word_key(text: str) -> tuple[str, ...]:
    return tuple(sorted(" ".join(_content(part.split())) for part in re.split(r",|\band\b", text)))


def _content(words: list[str]) -> list[str]:
    """Return words without plural s, without articles, and without "the function is" or "f is" in front."""
    verb = next((at for at, word in enumerate(words) if word in ("is", "are")), 0)
    said = (
        words[verb + 1 :]
        if verb and all(word in LEAD_INS or _LETTER.fullmatch(word) for word in words[:verb])
        else words
    )
    return [_stem(word) for word in said if word not in ("a", "an", "the", "on", "function")] or words


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and word not in HEDGES else word


def _same_range(gold: Reading, answer: Reading, left: tuple[Interval, ...], right: tuple[Interval, ...]) -> bool:
    if isinstance(gold, Several) and isinstance(answer, Several) and gold.brackets and answer.brackets:
        return _same_several(gold, answer)  # two pairs: points or intervals, by the same rule
    names = names_of(gold), names_of(answer)
    if names[0] and names[1] and names[0] != names[1]:
        return False
    return same_ranges(left, right)


def _all_same(gold: Sequence[Reading], answer: Sequence[Reading]) -> bool:
    return len(gold) == len(answer) and all(map(compare, gold, answer))


def _congruent(reading: Reading) -> Reading:
    r"""Return ``3 \bmod 7`` as the congruence ``3 \pmod 7``, for comparison with a congruence."""
    if isinstance(reading, Quantity) and reading.tree.op == "mod":
        return Modular(Quantity(reading.tree.args[0]), reading.tree.args[1])
    return reading


def _same_modular(gold: Reading, answer: Reading) -> bool:
    gold, answer = _congruent(gold), _congruent(answer)
    if isinstance(gold, Modular) and isinstance(answer, Modular):
        left = [side.value.sides[0] for side in (gold, answer) if isinstance(side.value, Relation)]
        if not same(gold.modulus, answer.modulus) or (len(left) == 2 and not compare(*left)):
            return False
    elif isinstance(answer, Modular) and not _is_least(answer):
        return False
    elif isinstance(answer, Relation) and isinstance(gold, Modular) and isinstance(gold.value, Relation):
        return False  # x = 2 is one of the numbers that are 2 mod 5
    return compare(_residue(gold), _residue(answer))


def _is_least(modular: Modular) -> bool:
    """Return whether the residue lies between 0 and the modulus: 1 mod 2 does, 3 mod 2 does not."""
    residue = _residue(modular)
    value = rational(residue.tree) if isinstance(residue, Quantity) else None
    modulus = rational(modular.modulus)
    return value is not None and modulus is not None and 0 <= value < modulus


def _residue(reading: Reading) -> Reading:
    if not isinstance(reading, Modular):
        return reading
    value = reading.value
    return value.sides[1] if isinstance(value, Relation) and value.operators == ("==",) else value


def _same_relation(gold: Reading, answer: Reading) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_relations(gold, answer)
    relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
    assert isinstance(relation, Relation)
    if relation is gold and isinstance(other, Quantity) and _is_solved(relation, other):
        return True
    values = _values(relation, as_gold=True) if relation is gold else _values_for(gold, relation)
    if isinstance(other, Several):
        if relation.operators == ("in",) and other.brackets == "":
            return False  # an interval needs its brackets
        values = [value for value in values if not isinstance(value, Relation)]
    return any(compare(value, other) if relation is gold else compare(other, value) for value in values)


def _same_relations(gold: Relation, answer: Relation) -> bool:
    if gold.is_inequality and answer.is_inequality:
        return _same_order(gold, answer)
    one_name = bool(gold.heads[0]) and same_name(gold.heads[0], answer.heads[0])
    if gold.operators == ("~",) and answer.operators in (("=",), ("~",)) and one_name:
        return any(compare(value, answer.sides[1]) for value in _values(gold, as_gold=True))
    assigned = _assigned(gold), _assigned(answer)
    if assigned[0] is not None and assigned[1] is not None and same_name(assigned[0][0], assigned[1][0]):
        return compare(assigned[0][1], assigned[1][1])
    if assigned[0] is not None and isinstance(assigned[0][1], Quantity) and is_numeral(assigned[0][1].tree):
        return False  # x = 5 is not answered by 7x = 35
    return _same_curve(gold, answer)


def _same_curve(gold: Relation, answer: Relation) -> bool:
    if gold.operators != answer.operators:
        return False
    if gold.operators != ("=",) or not all(isinstance(side, Quantity) for side in (*gold.sides, *answer.sides)):
        return _all_same(gold.sides, answer.sides)
    left, right = _difference(gold), _difference(answer)
    if symbols(left) != symbols(right):
        return False
    return proportional(left, right) or proportional(fraction(left)[0], fraction(right)[0])


def _is_solved(gold: Relation, answer: Quantity) -> bool:
    """Return whether the gold, solved for y, gives the answer, a formula of x: ``6/x`` for ``xy = 6``."""
    named = Relation(("=",), (Quantity(Node("sym", name="y")), answer), ("y", ""))
    return "x" in symbols(answer.tree) and _same_curve(gold, named)


def _difference(relation: Relation) -> Node:
    first, second = relation.sides[0], relation.sides[-1]
    assert isinstance(first, Quantity) and isinstance(second, Quantity)
    return Node("add", (first.whole, Node("neg", (second.whole,))))


def _same_order(gold: Relation, answer: Relation) -> bool:
    left, right = gold.ascending(), answer.ascending()
    if left is None or right is None or left[0] != right[0]:
        return False
    if _all_same(left[1], right[1]):
        return True
    if len(left[0]) != 1 or not all(isinstance(side, Quantity) for side in left[1] + right[1]):
        return False
    ordered = [Relation(("=",), tuple(sides), ("", "")) for sides in (left[1], right[1])]
    return proportional(_difference(ordered[0]), _difference(ordered[1]), positive=True)


def _assigned(relation: Relation) -> tuple[str, Reading] | None:
    """Return (name, value) of an assignment: ``x = 5``, ``5 = x``, ``x \\in A``, ``S = 2 + 3 = 5``; else None."""
    if relation.operators == ("in",) and relation.heads[0]:
        return None if isinstance(relation.sides[1], Quantity) else (relation.heads[0], relation.sides[1])
    if set(relation.operators) != {"="}:
        return None
    if len(relation.sides) == 2 and (measure := _measure(relation.sides[0])):
        return measure, relation.sides[1]
    if relation.heads[0] and not _consistent(relation.sides[1:]):
        return None
    if relation.heads[0] and not relation.heads[-1]:
        return None if _is_in(relation.heads[0], relation.sides[-1]) else (relation.heads[0], relation.sides[-1])
    if relation.heads[-1] and not relation.heads[0] and len(relation.sides) == 2:
        return None if _is_in(relation.heads[-1], relation.sides[0]) else (relation.heads[-1], relation.sides[0])
    return (relation.heads[0], relation.sides[-1]) if relation.heads[0] else None


def _is_in(name: str, value: Reading) -> bool:
    return isinstance(value, Quantity) and name in symbols(value.tree)


def _measure(side: Reading) -> str:
    """Return a name for a length (AB for ``|AB|`` and ``|BA|``) or a ratio (``S_1 : S_2``); "" for other sides."""
    if isinstance(side, Ratio):
        return ":".join(map(canonical, side.parts)) if all(map(symbols, side.parts)) else ""
    if not (isinstance(side, Quantity) and side.whole.op == "abs"):
        return ""
    names = sorted(symbols(side.tree))
    return "".join(names) if all(name[:1].isupper() for name in names) else ""


def _consistent(sides: tuple[Reading, ...]) -> bool:
    last = sides[-1]
    return all(
        compare(last, side)
        or (isinstance(last, Quantity) and isinstance(side, Quantity) and same(last.whole, side.whole))
        for side in sides[:-1]
    )


def _values(relation: Relation, as_gold: bool) -> list[Reading]:
    """Return the values that a relation states: 5 for ``x = 5``, a for ``a \\approx b`` (a gold also states b)."""
    if relation.operators[-1] == "~":
        exact = relation.sides[:-1]
        if relation.heads[0] and len(exact) == 1:
            last = relation.sides[-1]
            return [last.approximate() if isinstance(last, Quantity) else last]
        rest = Relation(relation.operators[:-1], exact, relation.heads[:-1]) if len(exact) > 1 else None
        values = _values(rest, as_gold) if rest else [exact[0]]
        if not as_gold and not _near(exact[-1], relation.sides[-1]):
            return []
        return [*values, relation.sides[-1]] if as_gold else values
    assigned = _assigned(relation)
    return [] if assigned is None else [assigned[1]]


def _near(exact: Reading, rounded: Reading) -> bool:
    if not (isinstance(exact, Quantity) and isinstance(rounded, Quantity)):
        return False
    value, shown = real(exact.tree), real(rounded.tree)
    if value is None or shown is None:
        return False
    return bool(
        abs(value - shown) <= (10.0 ** -decimals(rounded.tree) if is_numeral(exact.tree) else abs(value) / 10) / 2
    )


def _values_for(gold: Reading, answer: Relation) -> list[Reading]:
    values = _values(answer, as_gold=False)
    last = answer.sides[-1]
    if not values and set(answer.operators) == {"="} and isinstance(last, Quantity) and isinstance(gold, Quantity):
        first = answer.sides[0]
        numbers = isinstance(first, Quantity) and is_numeral(gold.tree) and is_numeral(last.tree)
        named = isinstance(first, Quantity) and len(symbols(first.tree)) > 1 and _consistent(answer.sides[1:])
        if numbers and (named or _consistent(answer.sides)):
            return [last]  # a + b = 7, a + b = 3 + 4 = 7 and 3 + 4 = 7 state a number
    return values


def _same_matrix(gold: Reading, answer: Reading) -> bool:
    rows = [_rows(side) for side in (gold, answer)]
    if not (isinstance(gold, Matrix) and isinstance(answer, Matrix)):  # a vector is a row or a column
        rows = [tuple(zip(*side, strict=True)) if side and len(side) == 1 else side for side in rows]
    if rows[0] is None or rows[1] is None or [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    pairs = zip(sum(rows[0], ()), sum(rows[1], ()), strict=True)
    return all(same_quantity(Quantity(ours), Quantity(theirs)) for ours, theirs in pairs)


def _rows(side: Reading) -> tuple[tuple[Node, ...], ...] | None:
    if isinstance(side, Matrix):
        return side.rows
    if not (isinstance(side, Several) and side.brackets in ("()", "[]")):
        return None
    if all(isinstance(item, Quantity) for item in side.items):
        return tuple((item.whole,) for item in side.items if isinstance(item, Quantity))  # a column written in a row
    rows = [_rows(item) for item in side.items]
    return None if None in rows else tuple(tuple(cell for (cell,) in row) for row in rows if row)  # [[1, 2], [3, 4]]


def _same_ratio(gold: Reading, answer: Reading) -> bool:
    parts = [_ratio_parts(side) for side in (gold, answer)]
    if parts[0] is None or parts[1] is None or len(parts[0]) != len(parts[1]) or len(parts[0]) < 2:
        return False
    ours, theirs = parts
    assert ours is not None and theirs is not None
    if any(part.op == "ldots" for part in ours + theirs):
        return all(a == b or same(a, b) for a, b in zip(ours, theirs, strict=True))
    zeros = [[same(part, number_node(0)) for part in side] for side in (ours, theirs)]
    if zeros[0] != zeros[1] or all(zeros[0]):
        return False
    over, under = next((b, a) for a, b, zero in zip(ours, theirs, zeros[0], strict=True) if not zero)
    crosses = ((Node("mul", (a, over)), Node("mul", (b, under))) for a, b in zip(ours, theirs, strict=True))
    return all(same(left, right) for left, right in crosses)


def _ratio_parts(side: Reading) -> tuple[Node, ...] | None:
    if isinstance(side, Ratio):
        return side.parts
    if isinstance(side, Quantity) and side.unit is None and not side.percent:
        return (side.tree, number_node(1))
    return None


def _same_cases(gold: Reading, answer: Reading) -> bool:
    sides = [side.sides[1] if isinstance(side, Relation) and len(side.sides) == 2 else side for side in (gold, answer)]
    ours, theirs = sides
    if not (isinstance(ours, Cases) and isinstance(theirs, Cases)) or len(ours.rows) != len(theirs.rows):
        return False
    return _matched(ours.rows, theirs.rows, _all_same)


def _same_several(gold: Reading, answer: Reading) -> bool:
    if not (isinstance(gold, Several) and isinstance(answer, Several)):
        group = gold if isinstance(gold, Several) else answer
        one = isinstance(group, Several) and group.brackets in ("", "{}") and len(group.items) == 1
        return one and compare(*(side.items[0] if isinstance(side, Several) else side for side in (gold, answer)))
    if max(len(gold.items), len(answer.items)) > _MAX_ITEMS:
        lists = [_numerals(side) for side in (gold, answer)]
        return lists[0] is not None and lists[0] == lists[1]
    if len(answer.items) > len(gold.items) > 1 and {answer.brackets, gold.brackets} <= {"", "{}"}:
        answer = Several(_distinct(answer.items), answer.brackets, answer.joined_by)
    if len(gold.items) != len(answer.items) or not _joined_alike(gold, answer):
        return False
    named = assignments(gold), assignments(answer)
    if (named[0] or named[1]) and _same_assignments(gold, answer, named):
        return True
    if any(_name_variables(names) for names in named):
        return False
    brackets = {gold.brackets, answer.brackets}
    if "{}" in brackets and brackets <= {"", "{}"}:
        return _matched(gold.items, answer.items, _same_member)
    if brackets == {""} and not any(isinstance(item, Dots) for item in gold.items):
        return _matched(gold.items, answer.items, _same_member)
    if brackets == {"", "()"}:
        bare = answer if gold.brackets else gold
        if bare.joined_by == "or" or any(isinstance(item, Relation) for item in bare.items):
            return False  # alternatives are no point
    return (len(brackets) == 1 or brackets == {"", "()"}) and _all_same(gold.items, answer.items)


def _numerals(group: Several) -> list[Fraction] | None:
    """Return the sorted values of a list that holds only plain numbers; None for any other list."""
    trees = [item.tree for item in group.items if isinstance(item, Quantity) and item == Quantity(item.tree)]
    values = [value for tree in trees if is_numeral(tree) and (value := rational(tree)) is not None]
    return sorted(values) if len(values) == len(group.items) and group.brackets in ("", "{}") else None


def _same_member(gold: Reading, answer: Reading) -> bool:
    """Compare members of sets or lists. ``\\{1\\}`` and 1 differ as members, while ``compare`` finds them equal."""
    braces = [isinstance(side, Several) and side.brackets == "{}" for side in (gold, answer)]
    return braces[0] == braces[1] and compare(gold, answer)


def _joined_alike(gold: Several, answer: Several) -> bool:
    """Return whether both lists join relations alike. "or" equals "and" only between the values of one variable."""
    joiners = {gold.joined_by, answer.joined_by}
    relations = [item for item in gold.items if isinstance(item, Relation)]
    if "or" not in joiners or len(joiners) == 1 or not relations:
        return True
    stated = [names_of(item) if item.is_inequality else {item.heads[0]} for item in relations]
    names = {frozenset(name.partition("_")[0] for name in named) for named in stated}
    excluding = any(relation.is_inequality or relation.operators == ("!=",) for relation in relations)
    return len(names) == 1 and not ("and" in joiners and excluding)


def _name_variables(names: dict[str, Reading] | None) -> bool:
    """Return whether ``names`` has several names, all of different variables. x_1 and x_2 are one variable."""
    return bool(names) and len({name.partition("_")[0] for name in names or ()}) == len(names or ()) > 1


def _same_assignments(gold: Several, answer: Several, named: tuple[dict[str, Reading] | None, ...]) -> bool:
    ours, theirs = named
    if ours and theirs:
        return ours.keys() == theirs.keys() and all(compare(ours[name], theirs[name]) for name in ours)
    if answer.brackets == "{}" or gold.brackets == "{}":
        return False
    if _name_variables(ours or theirs) and any(isinstance(item, Relation) for item in (answer if ours else gold).items):
        return False  # x = 1 or x = 2, beside x = 1 and y = 2
    if any(isinstance(item, Relation) and not item.heads[0] for item in (*gold.items, *answer.items)):
        return False  # yx = 1
    left = list(ours.values()) if ours else gold.items
    # Against a tuple, an answer's values count in the order of their letters, not in the order that it lists them.
    ordered = sorted((theirs or {}).items(), key=lambda named: "" if _LABEL.fullmatch(named[0]) else named[0])
    right = [value for _, value in ordered] if theirs else answer.items
    if _all_same(left, right):
        return True
    return bool(theirs) and gold.brackets == "" and _all_same(left, list((theirs or {}).values()))


def _distinct(items: tuple[Reading, ...]) -> tuple[Reading, ...]:
    kept: list[Reading] = []
    for item in items:
        if not any(compare(other, item) for other in kept):
            kept.append(item)
    return tuple(kept)


def _matched[T](ours: Sequence[T], theirs: Sequence[T], equal: Callable[[T, T], bool]) -> bool:
    """Return whether both sequences have the same items in any order, each equally often. ``equal`` compares two."""
    if len(ours) != len(theirs):
        return False
    rest = list(theirs)
    for item in ours:
        index = next((index for index, other in enumerate(rest) if equal(item, other)), None)
        if index is None:
            return False
        del rest[index]
    return True


_Rules = Sequence[tuple[type, Callable[[Reading, Reading], bool]]]
_WHOLE_RULES: _Rules = (
    (Conditional, _same_conditional),
    (Restated, _same_restated),
    (Words, _same_words),
    (Empty, operator.eq),
    (Dots, operator.eq),
    (Cases, _same_cases),
)
_SPREAD_RULES: _Rules = (
    (Modular, _same_modular),
    (Relation, _same_relation),
    (Matrix, _same_matrix),
    (Ratio, _same_ratio),
    (Several, _same_several),
)
"""``compare`` tries _WHOLE_RULES, then (after ``spread``) _SPREAD_RULES. The first rule for a side's type decides."""
