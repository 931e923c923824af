r"""Works out an expression's value at a point: exactly if arithmetic gives a rational number, else rounded.

Exact values may be large (up to 200,000 bits), so ``2^{1000}`` and ``2^{1000}-1`` differ.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

import mpmath

from or1_verify.errors import Or1Error
from or1_verify.math.reader.expression_tree import Node, symbols

_MAX_BITS = 200_000
_GROWING = frozenset({"add", "mixed", "mul", "div"})
_MAX_FACTORIAL = 5000
_MAX_EXPONENT = 4096.0


class TooLarge(Or1Error):
    """A value has too many digits, or needs an operation that we never compute, such as a sum over k or a gcd."""


class Undefined(Or1Error):
    """Division by zero, a function outside its domain, or an operation that has no value here."""


@lru_cache(maxsize=4096)
def rational(tree: Node) -> Fraction | None:
    """Return an expression's exact value; None if arithmetic alone gives no rational number or the value is huge."""
    try:
        return _rational(tree)
    except (ZeroDivisionError, TooLarge):
        return None


def _rational(tree: Node) -> Fraction | None:
    if tree.op == "num":
        return tree.number
    values = [_rational(argument) for argument in tree.args]
    known = [value for value in values if value is not None]
    if tree.op not in _EXACT or not known or len(known) < len(values):
        return None
    value = _EXACT[tree.op](*known)
    if value is None:
        return None
    exact = Fraction(value)
    if tree.op in _GROWING and exact.numerator.bit_length() + exact.denominator.bit_length() > _MAX_BITS:
        raise TooLarge
    return exact


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > _MAX_BITS:
        raise TooLarge
    if base == 0 and exponent <= 0:
        raise ZeroDivisionError
    return base ** int(exponent) if bits > 1 else (Fraction(1) if exponent % 2 == 0 or base == 1 else base)


def _rational_root(radicand: Fraction, index: Fraction) -> Fraction | None:
    if index != 2 or radicand < 0:
        return None
    top, bottom = math.isqrt(radicand.numerator), math.isqrt(radicand.denominator)
    exact = top * top == radicand.numerator and bottom * bottom == radicand.denominator
    return Fraction(top, bottom) if exact else None


def _of_integers(function: Callable[..., int]) -> Callable[..., int | None]:
    def applied(*values: Fraction) -> int | None:
        countable = all(value.denominator == 1 and value >= 0 for value in values) and values[0] <= _MAX_FACTORIAL
        return function(*map(int, values)) if countable else None

    return applied


_BOTH: Mapping[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "add": operator.add,
    "mixed": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "abs": abs,
}
_EXACT: Mapping[str, Callable[..., Fraction | int | None]] = {
    **_BOTH,
    "pow": _rational_power,
    "root": _rational_root,
    "floor": math.floor,
    "ceil": math.ceil,
    "mod": operator.mod,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "factorial": _of_integers(math.factorial),
    "binom": _of_integers(math.comb),
    "perm": _of_integers(math.perm),
}
"""Operations on rational values. An operation returns None if its result is not rational, or not worked out."""


def evaluate(tree: Node, point: Mapping[str, mpmath.mpf]) -> mpmath.mpc:
    """Return an expression's value at a point, at mpmath's current precision. Raises TooLarge or Undefined."""
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
    """Return the floor. A value that differs from an integer only by rounding (log10 of 1000) is that integer."""
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
    if of == 0:
        raise Undefined("the logarithm of zero")
    return mpmath.log(of) if base is None else mpmath.log(of) / mpmath.log(base)


_OPERATIONS: Mapping[str, Callable[..., mpmath.mpc]] = {
    **_BOTH,
    "pow": _power,
    "root": _root,
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
    "call": lambda function, *values: reduce(
        lambda so_far, value: mpmath.sin(so_far + function * value), values, function
    ),
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{name: getattr(mpmath, name) for name in ("sinh", "cosh", "tanh")},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan")},
}


def real(tree: Node) -> mpmath.mpf | None:
    """Return a constant's real value to 60 digits, or infinity; None if it has no real value."""
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
