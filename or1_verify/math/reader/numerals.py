"""Tells whether an expression is a finished number, such as 6/8 but not 2 + 3, and how many decimals it shows."""

from __future__ import annotations

import re

from or1_verify.math.reader.expression_tree import Node
from or1_verify.math.reader.numeric_value import rational


def is_numeral(tree: Node) -> bool:
    """Return whether the tree is a finished number, with nothing to work out: 35, -0.5, 6/8, 2 1/3, 3.2·10^5."""
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


def decimals(tree: Node) -> int:
    """Return how many digits a decimal has behind its point; 0 for any other tree."""
    inner = tree.args[0] if tree.op == "neg" else tree
    return len(inner.name.partition(".")[2]) if inner.op == "num" and re.fullmatch(r"\d*\.\d+", inner.name) else 0
