r"""Decides whether two expressions are equal: exactly where both are rational, else by values at sample points.

Constants that are not rational are compared at 60 digits and, when they agree, at 300. Expressions in variables are
compared at fixed points of five decimals, positive and of mixed signs. An expression that is too large to evaluate
(``9^{9^9}``) is equal only to an expression that is written the same way, up to the order of terms and factors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import count, takewhile

import mpmath

from or1_verify.math.reader.expression_tree import Node, number_node, operations, symbols
from or1_verify.math.reader.numeric_value import TooLarge, Undefined, evaluate, rational

_POSITIVE = ("0.73205", "1.41523", "2.23711", "0.31871", "1.77245", "3.14592", "0.57729", "2.66514")


def _points(names: list[str]) -> Iterator[tuple[bool, dict[str, mpmath.mpf]]]:
    """Yield (whether complex values must agree too, point): three positive points, then two of mixed signs."""
    for shift in range(5):
        signs = [1] * len(names) if shift < 3 else [(-1) ** (index + shift) for index in range(len(names))]
        yield (
            shift < 3,
            {
                name: sign * (mpmath.mpf(_POSITIVE[(index * 3 + shift) % 8]) + mpmath.mpf(index) / 7)
                for index, (name, sign) in enumerate(zip(names, signs, strict=True))
            },
        )


def canonical(tree: Node) -> str:
    """Return the tree as a text that ignores the order of terms and factors; -a and (-1)a get the same text."""
    if (value := rational(tree)) is not None:
        return f"{value.numerator:x}/{value.denominator:x}"  # hexadecimal, because Python refuses long decimals
    if tree.op in ("add", "mul"):
        return f"{tree.op}({','.join(sorted(_flat(tree, tree.op)))})"
    if tree.op == "neg":
        return canonical(Node("mul", (Node("num", number=Fraction(-1), name="-1"), tree.args[0])))
    if tree.op in ("sym", "pi"):
        return tree.name or tree.op
    return f"{tree.op}({','.join(map(canonical, tree.args))})"


def _flat(tree: Node, op: str) -> list[str]:
    if tree.op != op:
        return [canonical(tree)]
    return [part for argument in tree.args for part in _flat(argument, op)]


def same(left: Node, right: Node) -> bool:
    """Return whether two expressions are equal for all values of their variables, as far as we can tell."""
    if left == right:
        return True
    exact_left, exact_right = rational(left), rational(right)
    if exact_left is not None and exact_right is not None:
        return exact_left == exact_right
    if canonical(left) == canonical(right):
        return True
    names = sorted(symbols(left) | symbols(right))
    try:
        return same_constant(left, right) if not names else _same_everywhere(left, right, names)
    except (TooLarge, Undefined):
        return False


def same_constant(left: Node, right: Node) -> bool:
    """Return whether two constants agree to 300 digits, or to more if a part of them has more than 120 digits."""
    digits = 60
    for _ in range(2):
        with mpmath.workdps(digits + 10):
            if not _close(evaluate(left, {}), evaluate(right, {}), digits):
                return False
            digits = max(300, 2 * max(_longest(left), _longest(right)) + 60)
    return True


def _longest(tree: Node) -> int:
    """Return the largest absolute exponent of ten in a constant or any part of it: 5 for 10^5 and for 10^-5."""
    value = abs(evaluate(tree, {}))
    return max([int(abs(mpmath.log10(value))) if value else 0, *map(_longest, tree.args)])


def _close(left: mpmath.mpc, right: mpmath.mpc, digits: int) -> bool:
    size = max(abs(left), abs(right))
    return size == 0 or abs(left - right) <= size * mpmath.mpf(10) ** -(digits - 8)


def _with_integers(tree: Node, names: list[str], values: Iterable[int]) -> Node:
    point = dict(zip(names, map(number_node, values), strict=True))
    return tree.replaced(lambda node: point.get(node.name) if node.op == "sym" else None)


_INTEGERS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def _differ_exactly(left: Node, right: Node, names: list[str]) -> bool:
    """Return whether two rational expressions differ, even slightly, at one point of small integers."""
    numbers = [_INTEGERS[index % 10] + index // 10 for index in range(len(names))]
    values = rational(_with_integers(left, names, numbers)), rational(_with_integers(right, names, numbers))
    return None not in values and values[0] != values[1]


_SPLIT = frozenset({"abs", "root", "floor", "ceil", "max", "min"})
_WIDE_DIGITS = 150
"""Digits of the values at points far from 0, where ``\\sqrt{x^6+1} - x^3`` loses many digits."""


def _wide_points(names: list[str], *trees: Node) -> Iterator[dict[str, mpmath.mpf]]:
    """Yield points on both sides of 0, up to 10 times the trees' largest number, if a tree has a part like |x + 10|."""
    if not any(_SPLIT & operations(tree) for tree in trees):
        return
    numbers = [abs(node.number) for tree in trees for node in tree.walk()]
    farthest = 10 * float(min(max(*numbers, Fraction(100)), Fraction(10**15)))
    for size in takewhile(lambda size: size < farthest, (4.7 * 3.3**k for k in count())):
        for sign in (1, -1):
            for other in (1, -1) if len(names) > 1 else (1,):
                yield {
                    name: sign * other**index * (mpmath.mpf(size) + mpmath.mpf(index) / 7)
                    for index, name in enumerate(names)
                }


_NEAR_DIGITS = 40


def _samples(left: Node, right: Node, names: list[str]) -> Iterator[tuple[mpmath.mpc, mpmath.mpc, bool, int]]:
    """Yield (left value, right value, whether complex values must agree too, digits) at points where both are defined.

    Raises TooLarge if a value at a point near 0 is too large.
    """
    for strict, point in _points(names):
        try:
            yield evaluate(left, point), evaluate(right, point), strict, _NEAR_DIGITS
        except Undefined:
            continue
    for point in _wide_points(names, left, right):
        try:
            with mpmath.workdps(_WIDE_DIGITS):
                values = evaluate(left, point), evaluate(right, point)
        except (Undefined, TooLarge):
            continue
        if not any(map(_is_complex, values)):
            yield (*values, False, 35)


def _is_complex(value: mpmath.mpc) -> bool:
    return bool(abs(mpmath.im(value)) > 1e-30)


_STEPS = frozenset({"floor", "ceil", "mod"})
_COUNTED = frozenset("ijklmnpqrNMK")
"""Letters that stand for integers in a formula with steps (floor, mod, ...) or with a power of -1."""
_CHECKED_POINTS = 200


def _same_on_integers(left: Node, right: Node, names: list[str]) -> bool:
    """Return whether both agree at small and random integers, and at multiples and powers of their numerals."""
    seen = 0
    with mpmath.workdps(60):
        for values in _integer_points(names, left, right):
            sides = [_with_integers(side, names, values) for side in (left, right)]
            exact = [rational(side) for side in sides]
            try:
                if None not in exact:
                    agree = exact[0] == exact[1]
                else:
                    agree = _close(evaluate(sides[0], {}), evaluate(sides[1], {}), _NEAR_DIGITS)
            except (Undefined, TooLarge):
                continue
            if not agree:
                return False
            seen += 1
    return seen >= 10


def _integer_points(names: list[str], *trees: Node) -> Iterator[tuple[int, ...]]:
    numbers = {node.number for tree in trees for node in tree.walk() if node.op == "num"}
    steps = sorted(int(number) for number in numbers if number.denominator == 1 and 1 < number < 10**7)
    near = {
        base + off for step in steps[:6] for base in (step, 2 * step, 3 * step, step**2, step**3) for off in (-1, 0, 1)
    }
    draw = random.Random(0)
    if len(names) == 1:
        yield from ((value,) for value in sorted({*range(1, 41), *near} - {0}))
        yield from ((draw.randint(1, 10**5),) for _ in range(20))
        return
    for index in range(_CHECKED_POINTS):
        most = 12 if index % 2 else 300
        values = [draw.randint(1, most) for _ in names]
        if near and index % 4 == 0:
            values[index % len(names)] = draw.choice(sorted(near - {0}))
        yield tuple(values)


def _alternates(tree: Node) -> bool:
    """Return whether a negative number has a variable in its exponent, as (-1)^n."""
    powers = [node.args for node in tree.walk() if node.op == "pow" and symbols(node.args[1])]
    return any((base := rational(args[0])) is not None and base < 0 for args in powers)


def _same_everywhere(left: Node, right: Node, names: list[str]) -> bool:
    if _differ_exactly(left, right, names):
        return False
    stepped = bool(_STEPS & (operations(left) | operations(right)))
    counted = set(names) <= _COUNTED
    if stepped and not _same_on_integers(left, right, names):
        return False
    if counted and (stepped or _alternates(left) or _alternates(right)):
        return stepped or _same_on_integers(left, right, names)
    seen = 0
    with mpmath.workdps(50):
        for ours, theirs, strict, digits in _samples(left, right, names):
            if not strict and (_is_complex(ours) or _is_complex(theirs)):
                continue  # branches of roots and logarithms of negative numbers say nothing
            if not _close(ours, theirs, digits):
                return False
            seen += digits == _NEAR_DIGITS
    return seen >= 2


def fraction(tree: Node) -> tuple[Node, Node]:
    """Return an expression as one fraction, (numerator, denominator), without cancelling common factors."""
    parts = [fraction(argument) for argument in tree.args] if tree.op in ("neg", "add", "mul", "div") else []
    if not parts:
        return tree, Node("num", number=Fraction(1), name="1")
    top, under = parts[0]
    if tree.op == "neg":
        return Node("neg", (top,)), under
    for other_top, other_under in parts[1:]:
        if tree.op == "add":
            top = Node("add", (Node("mul", (top, other_under)), Node("mul", (other_top, under))))
            under = Node("mul", (under, other_under))
        elif tree.op == "mul":
            top, under = Node("mul", (top, other_top)), Node("mul", (under, other_under))
        else:
            top, under = Node("mul", (top, other_under)), Node("mul", (under, other_top))
    return top, under


def proportional(left: Node, right: Node, positive: bool = False) -> bool:
    """Return whether left / right is one constant other than zero; with ``positive``, one above zero."""
    names = sorted(symbols(left) | symbols(right))
    ratio: mpmath.mpc | None = None
    seen = 0
    try:
        with mpmath.workdps(50):
            for over, under, _, digits in _samples(left, right, names):
                if abs(over) < 1e-30 or abs(under) < 1e-30:
                    continue
                if ratio is not None and not _close(ratio, over / under, digits):
                    return False
                ratio = over / under
                seen += digits == _NEAR_DIGITS
    except TooLarge:
        return False
    if ratio is None or seen < 2:
        return False
    return not positive or (mpmath.im(ratio) == 0 and mpmath.re(ratio) > 0)
