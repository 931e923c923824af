r"""Decides when two values are the same answer: equal numbers, worked out as far as asked, with units that agree."""

from __future__ import annotations

import re

from or1_megatron.verify.math.reader.quantity import Quantity
from or1_megatron.verify.math.reader.tree import Node, number_node
from or1_megatron.verify.math.reader.units import UNITS
from or1_megatron.verify.math.reader.value import operations, rational, real, same, symbols

_FAMILIES = (
    frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan"}),
    frozenset({"sinh", "cosh", "tanh"}),
    frozenset({"ln", "log", "lg"}),
    frozenset({"factorial", "binom", "perm"}),
    frozenset({"sum", "prod"}),
    frozenset({"floor", "ceil"}),
    frozenset({"gcd", "lcm", "max", "min", "det", "exp"}),
)


def is_numeral(tree: Node) -> bool:
    """Whether it is a number with nothing left to work out: 35, -0.5, 6/8, 2 1/3, 3.2·10^5."""
    if tree.op == "neg":
        return tree.args[0].op != "neg" and is_numeral(tree.args[0])
    if tree.op in ("num", "mixed"):
        return True
    if tree.op == "div":
        return all(_is_integer(argument) or _is_power_of_ten(argument) for argument in tree.args)
    if tree.op == "pow":
        return _is_power_of_ten(tree)
    if tree.op == "mul":
        return tree.args[0].op == "num" and _is_power_of_ten(tree.args[1])
    if tree.op == "add":  # 2 + 1/3
        whole, part = tree.args
        return _is_integer(whole) and part.op == "div" and all(map(_is_integer, part.args)) and _below_one(part)
    return False


def _below_one(tree: Node) -> bool:
    value = rational(tree)
    return value is not None and 0 < value < 1


def _is_integer(tree: Node) -> bool:
    return (tree.op == "num" and tree.number.denominator == 1) or (tree.op == "neg" and tree.args[0].op == "num")


def _is_power_of_ten(tree: Node) -> bool:
    return tree.op == "pow" and tree.args[0].op == "num" and tree.args[0].number == 10 and _is_integer(tree.args[1])


def is_worked_out(gold: Node, answer: Node) -> bool:
    """Whether the answer leaves no more to be worked out than the gold does.

    For a plain number only a numeral will do. For a closed form, a function of constants is refused unless the gold has
    one of its family: the sin 15° of a question must not be its own answer.
    """
    if is_numeral(gold):
        return is_numeral(answer)
    allowed = set(operations(gold))
    return all(family & allowed for family in _FAMILIES if family & set(_constant_functions(answer)))


def _constant_functions(tree: Node) -> set[str]:
    own = {tree.op} if tree.args and not symbols(tree) else set()
    return own.union(*map(_constant_functions, tree.args))


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether the answer has the gold's value, with regard to units and percent signs."""
    if answer.approximated and not (gold.approximated or _decimals(gold.tree)):
        return False
    if gold.noun and answer.noun and _noun(gold.noun) != _noun(answer.noun):
        return False
    if (gold.unit and answer.noun) or (answer.unit and gold.noun):
        return False
    if gold.percent or answer.percent:
        return _same_percent(gold, answer)
    if gold.approximated:
        return _rounds_to(answer.tree, gold.tree)
    if gold.unit is not None or answer.unit is not None:
        return _same_with_units(gold, answer)
    return is_worked_out(gold.tree, answer.tree) and same(gold.tree, answer.tree)


def _noun(text: str) -> str:
    return " ".join(word.rstrip("s") for word in text.split())


def _decimals(tree: Node) -> int:
    """Return the number of digits behind a decimal point; 0 for anything but a decimal."""
    inner = tree.args[0] if tree.op == "neg" else tree
    return len(inner.name.partition(".")[2]) if inner.op == "num" and re.fullmatch(r"\d*\.\d+", inner.name) else 0


def _rounds_to(answer: Node, gold: Node) -> bool:
    ours, theirs = real(gold), real(answer)
    if ours is None or theirs is None or not is_numeral(gold):
        return same(gold, answer)
    return bool(abs(ours - theirs) <= (0.5 + 1e-9) * 10.0 ** -_decimals(gold))


def _same_percent(gold: Quantity, answer: Quantity) -> bool:
    if not is_worked_out(gold.tree, answer.tree) or gold.unit or answer.unit:
        return False
    if same(gold.tree, answer.tree):
        if gold.percent:
            return True
        value = real(gold.tree)
        return value is not None and abs(value) > 1  # below 1 a plain gold is a share
    hundredth = Node("div", (answer.tree if answer.percent else gold.tree, number_node(100)))
    other = gold.tree if answer.percent else answer.tree
    return gold.percent != answer.percent and same(hundredth, other)


def _same_with_units(gold: Quantity, answer: Quantity) -> bool:
    if gold.unit is None or answer.unit is None:
        return _same_with_one_unit(gold, answer)
    if not is_worked_out(gold.tree, answer.tree) or gold.unit[0] != answer.unit[0]:
        return False
    sizes = gold.unit[1], answer.unit[1]
    return same(Node("mul", (gold.tree, number_node(sizes[0]))), Node("mul", (answer.tree, number_node(sizes[1]))))


def _same_with_one_unit(gold: Quantity, answer: Quantity) -> bool:
    """Compare where one side has no unit: it is the question's. For an angle it is degrees, or radians with a pi."""
    unit = gold.unit or answer.unit
    assert unit is not None
    bare, other = (answer.tree, gold.tree) if gold.unit else (gold.tree, answer.tree)
    if unit == UNITS["degree"] and "pi" in operations(bare):
        return same(bare, Node("degree", (other,)))
    return is_worked_out(gold.tree, answer.tree) and same(gold.tree, answer.tree)
