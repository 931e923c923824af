r"""Compares two expressions: exactly where both are rational, else by precise values at sample points.

Rational values are exact, whatever their size up to a budget, so that ``2^{1000}`` and ``2^{1000}-1`` differ. Other
constants are compared at 60 digits and, when they agree, at 300. Expressions in variables are compared at fixed
irrational-looking points, positive and of mixed sign. An expression that is too large to evaluate (``9^{9^9}``) is
equal only to one that is written the same way, up to the order of terms and factors.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache

import mpmath

from or1_verify.errors import Or1Error
from or1_verify.math.reader.tree import Node

_MAX_BITS = 200_000
_MAX_FACTORIAL = 5000
_MAX_EXPONENT = 4096.0
_DIGITS = (60, 300)
_MOST_DIGITS = 10_000


class TooLarge(Or1Error):
    """The value has more digits than we compute."""


class Undefined(Or1Error):
    """Division by zero, a function outside its domain, or an operation that has no value here."""


def symbols(tree: Node) -> frozenset[str]:
    """Return the variables of an expression; i and e are constants."""
    if tree.op == "sym":
        return frozenset() if tree.name in ("i", "e") else frozenset({tree.name})
    return frozenset().union(*map(symbols, tree.args))


def operations(tree: Node) -> Iterator[str]:
    """Yield the name of every operation in the tree."""
    yield tree.op
    for argument in tree.args:
        yield from operations(argument)


@lru_cache(maxsize=4096)
def rational(tree: Node) -> Fraction | None:
    """Return the exact value where arithmetic alone gives a rational one that is small enough; None otherwise."""
    try:
        return _rational(tree)
    except (ZeroDivisionError, TooLarge):
        return None


def _rational(tree: Node) -> Fraction | None:
    if tree.op == "num":
        return tree.number
    values = [_rational(argument) for argument in tree.args]
    if not values or None in values:
        return None
    known = [value for value in values if value is not None]
    first = known[0]
    match tree.op, known:
        case "neg", _:
            return -first
        case (("add" | "mixed"), [_, second]):
            return _sized(first + second)
        case "mul", [_, second]:
            return _sized(first * second)
        case "div", [_, second]:
            return _sized(first / second)
        case "pow", [_, second]:
            return _rational_power(first, second)
        case "root", [_, second] if second == 2 and first >= 0:
            top, bottom = math.isqrt(first.numerator), math.isqrt(first.denominator)
            exact = top * top == first.numerator and bottom * bottom == first.denominator
            return Fraction(top, bottom) if exact else None
        case "abs", _:
            return abs(first)
        case "floor", _:
            return Fraction(math.floor(first))
        case "ceil", _:
            return Fraction(math.ceil(first))
        case "mod", [_, second]:
            return first - second * math.floor(first / second)
        case "max", _:
            return max(known)
        case "min", _:
            return min(known)
        case "factorial", _ if first.denominator == 1 and 0 <= first <= _MAX_FACTORIAL:
            return Fraction(math.factorial(int(first)))
        case (("binom" | "perm"), [_, second]) if _countable(first, second):
            count = math.comb if tree.op == "binom" else math.perm
            return Fraction(count(int(first), int(second)))
    return None


def _countable(first: Fraction, second: Fraction) -> bool:
    return first.denominator == second.denominator == 1 and 0 <= first <= _MAX_FACTORIAL and second >= 0


def _sized(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
        raise TooLarge
    return value


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > _MAX_BITS:
        raise TooLarge
    if base == 0 and exponent <= 0:
        raise ZeroDivisionError
    return base ** int(exponent) if bits > 1 else (Fraction(1) if exponent % 2 == 0 or base == 1 else base)


def evaluate(tree: Node, point: Mapping[str, mpmath.mpf]) -> mpmath.mpc:
    """Return the value at a point, at mpmath's current precision. Raises TooLarge or Undefined."""
    try:
        value = _value(tree, point)
    except (ZeroDivisionError, ValueError, OverflowError, mpmath.libmp.NoConvergence) as error:
        raise Undefined(str(error)) from None
    if mpmath.isnan(value) or mpmath.isinf(value):
        raise Undefined("not finite")
    return value


def _value(tree: Node, point: Mapping[str, mpmath.mpf]) -> mpmath.mpc:
    if tree.op == "num":
        return mpmath.mpf(tree.number.numerator) / tree.number.denominator
    if tree.op == "sym":
        return mpmath.mpc(0, 1) if tree.name == "i" else mpmath.e if tree.name == "e" else point[tree.name]
    if tree.op == "pi":
        return +mpmath.pi
    if tree.op not in _OPERATIONS:  # sum, prod, pm, mp, infty, gcd, lcm, det: compared as they are written
        raise TooLarge
    if tree.op == "pow" and (exponent := rational(tree.args[1])) is not None and exponent.denominator % 2:
        base = _value(tree.args[0], point)
        if exponent.denominator > 1 and mpmath.im(base) == 0 and mpmath.re(base) < 0:  # a real root, as in school
            return _power(-base, _value(tree.args[1], point)) * (-1) ** (exponent.numerator % 2)
        return _power(base, _value(tree.args[1], point))
    return _OPERATIONS[tree.op](*[_value(argument, point) for argument in tree.args])


def _power(base: mpmath.mpc, exponent: mpmath.mpc) -> mpmath.mpc:
    if base == 0:
        if mpmath.re(exponent) <= 0:
            raise Undefined("zero to a power that is not positive")
        return mpmath.mpf(0)
    if abs(exponent) * (1 + abs(mpmath.log(abs(base)))) > _MAX_EXPONENT:
        raise TooLarge
    return mpmath.power(base, exponent)


def _root(radicand: mpmath.mpc, index: mpmath.mpc) -> mpmath.mpc:
    if mpmath.im(radicand) == 0 and mpmath.re(radicand) < 0 and index % 2 == 1:  # a real root, as in school
        return -mpmath.power(-radicand, 1 / index)
    return mpmath.power(radicand, 1 / index) if index != 2 else mpmath.sqrt(radicand)


def _floor(value: mpmath.mpf) -> mpmath.mpf:
    """Return the floor; what is an integer but for rounding is that integer: the logarithm of 1000 to base 10."""
    nearest = mpmath.nint(value)
    return nearest if abs(value - nearest) < mpmath.mpf(10) ** -(mpmath.mp.dps // 2) else mpmath.floor(value)


def _of_reals(function: Callable[..., mpmath.mpf]) -> Callable[..., mpmath.mpf]:
    def applied(*values: mpmath.mpc) -> mpmath.mpf:
        if any(mpmath.im(value) != 0 for value in values):
            raise Undefined("a function of reals, of what is not real")
        return function(*map(mpmath.re, values))

    return applied


def _counting(function: Callable[..., mpmath.mpc]) -> Callable[..., mpmath.mpc]:
    def applied(*values: mpmath.mpc) -> mpmath.mpc:
        if any(abs(value) > _MAX_FACTORIAL for value in values):
            raise TooLarge
        return function(*values)

    return applied


def _logarithm(of: mpmath.mpc, base: mpmath.mpc | None = None) -> mpmath.mpc:
    """Return the logarithm, natural for ``base`` None. Raises Undefined for zero."""
    if of == 0:
        raise Undefined("the logarithm of zero")
    return mpmath.log(of) if base is None else mpmath.log(of) / mpmath.log(base)


_OPERATIONS: Mapping[str, Callable[..., mpmath.mpc]] = {
    "neg": operator.neg,
    "add": operator.add,
    "mixed": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": _power,
    "root": _root,
    "abs": abs,
    "floor": _of_reals(lambda value: _floor(value)),
    "ceil": _of_reals(lambda value: -_floor(-value)),
    "mod": _of_reals(lambda value, modulus: value - modulus * _floor(value / modulus)),
    "max": _of_reals(lambda *values: max(values)),
    "min": _of_reals(lambda *values: min(values)),
    "perm": _of_reals(lambda n, k: mpmath.gamma(n + 1) / mpmath.gamma(n - k + 1)),
    "factorial": _counting(mpmath.factorial),
    "binom": _counting(mpmath.binomial),
    "exp": lambda exponent: _power(mpmath.e, exponent),
    "ln": lambda of: _logarithm(of),
    "lg": lambda of: _logarithm(of) * (1 / mpmath.log(10)),
    # A bare \log has an unknown base: it equals neither \ln nor \lg, but ratios of two \log are right.
    "log": lambda of, base=None: _logarithm(of, base) * (mpmath.mpf("1.6180339") if base is None else 1),
    "degree": lambda angle: angle * mpmath.pi / 180,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tan": mpmath.tan,
    "cot": mpmath.cot,
    "sec": mpmath.sec,
    "csc": mpmath.csc,
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "sinh": mpmath.sinh,
    "cosh": mpmath.cosh,
    "tanh": mpmath.tanh,
}


_POSITIVE = ("0.73205", "1.41523", "2.23711", "0.31871", "1.77245", "3.14592", "0.57729", "2.66514")


def _points(names: list[str]) -> Iterator[tuple[bool, dict[str, mpmath.mpf]]]:
    """Yield (whether values must agree even where complex, point): three positive points, two of mixed signs."""
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
    """Return one spelling for trees that differ only in the order of terms and factors, or in how signs are written."""
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
    """Whether two expressions are equal for all values of their variables, as far as we can tell."""
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
    """Compare two constants, by twice the digits of the largest number in them: a root of 4^500 - 1 is not 2^500."""
    largest = 2 * max(_longest(left), _longest(right)) + 60
    if largest > _MOST_DIGITS:
        raise TooLarge
    for digits in (_DIGITS[0], max(_DIGITS[1], largest)):
        with mpmath.workdps(digits + 10):
            if not _close(evaluate(left, {}), evaluate(right, {}), digits):
                return False
    return True


def _longest(tree: Node) -> int:
    """Return the decimal digits of the longest rational number in a tree, powers worked out."""
    value = rational(tree)
    if value is not None:
        return int(max(value.numerator.bit_length(), value.denominator.bit_length()) * 0.302) + 1
    return max(map(_longest, tree.args), default=0)


def _close(left: mpmath.mpc, right: mpmath.mpc, digits: int) -> bool:
    size = max(abs(left), abs(right))
    return size == 0 or abs(left - right) <= size * mpmath.mpf(10) ** -(digits - 8)


def substituted(tree: Node, point: Mapping[str, Node]) -> Node:
    """Return the expression with trees in place of its variables."""
    if tree.op == "sym":
        return point.get(tree.name, tree)
    return Node(tree.op, tuple(substituted(argument, point) for argument in tree.args), tree.number, tree.name)


_INTEGERS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def _differ_exactly(left: Node, right: Node, names: list[str]) -> bool:
    """Whether two rational expressions differ at one point of small integers, however little."""
    numbers = [Fraction(_INTEGERS[index % 10] + index // 10) for index in range(len(names))]
    point = {name: Node("num", number=number) for name, number in zip(names, numbers, strict=True)}
    values = rational(substituted(left, point)), rational(substituted(right, point))
    return None not in values and values[0] != values[1]


_SPLIT = frozenset({"abs", "root", "floor", "ceil", "max", "min"})
_WIDE = ("4.7", "11.3", "57.1", "1013.7")
_WIDE_DIGITS = 150
"""Far from 0 a difference such as that of ``\\sqrt{x^6+1}`` and ``x^3`` loses many."""


def _wide_points(names: list[str], *trees: Node) -> Iterator[dict[str, mpmath.mpf]]:
    """Yield points far from 0 on both sides, for trees that may be other functions there: ``|x + 10|``."""
    if not any(_SPLIT & set(operations(tree)) for tree in trees):
        return
    for size in _WIDE:
        for sign in (1, -1):
            for other in (1, -1) if len(names) > 1 else (1,):
                yield {
                    name: sign * other**index * (mpmath.mpf(size) + mpmath.mpf(index) / 7)
                    for index, name in enumerate(names)
                }


_NEAR_DIGITS = 40


def _samples(left: Node, right: Node, names: list[str]) -> Iterator[tuple[mpmath.mpc, mpmath.mpc, bool, int]]:
    """Yield both values at all points where they are defined, whether they count even where complex, and their digits.

    Raises TooLarge where one is too large near 0.
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
"""Letters that stand for integers where a formula has steps, or a power of -1."""
_CHECKED_POINTS = 200


def _same_on_integers(left: Node, right: Node, names: list[str]) -> bool:
    """Compare at small integers, beside the multiples and powers of the numbers in both, and at random ones."""
    seen = 0
    with mpmath.workdps(60):
        for values in _integer_points(names, left, right):
            point = {name: Node("num", number=Fraction(value)) for name, value in zip(names, values, strict=True)}
            sides = [substituted(side, point) for side in (left, right)]
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
    steps = sorted({number for tree in trees for number in _integers_in(tree) if 1 < number < 10**7})
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


def _integers_in(tree: Node) -> Iterator[int]:
    if tree.op == "num" and tree.number.denominator == 1:
        yield int(tree.number)
    for argument in tree.args:
        yield from _integers_in(argument)


def _alternates(tree: Node) -> bool:
    """Whether a negative number has a variable in its exponent."""
    if tree.op == "pow" and symbols(tree.args[1]):
        base = rational(tree.args[0])
        return base is not None and base < 0
    return any(map(_alternates, tree.args))


def _same_everywhere(left: Node, right: Node, names: list[str]) -> bool:
    if _differ_exactly(left, right, names):
        return False
    stepped = bool(_STEPS & {*operations(left), *operations(right)})
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
    """Return (numerator, denominator) of sums, products and quotients as one fraction; nothing is cancelled."""
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
    """Whether left / right is one constant, not zero (``positive``: above zero): the same curve or inequality."""
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


def real(tree: Node) -> mpmath.mpf | None:
    """Return a constant's real value at 60 digits, or None. Infinity is a value."""
    if tree.op == "infty":
        return mpmath.inf
    if tree.op == "neg" and tree.args[0].op == "infty":
        return -mpmath.inf
    if symbols(tree):
        return None
    try:
        with mpmath.workdps(70):
            value = evaluate(tree, {})
    except (TooLarge, Undefined):
        return None
    return mpmath.re(value) if abs(mpmath.im(value)) < mpmath.mpf(10) ** -50 else None
