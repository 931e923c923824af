"""Reads other people's tests of math rules from their sources, as labelled pairs. It runs and keeps nothing of theirs.

It reads pytest's ``parametrize("gold,pred,expected", [...])`` and unittest methods that assign two texts and assert, or
assert not, that a call with them is true.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from math_pairs import Pair

_MAX_CHARS = 400


def suite_pairs(folder: Path) -> list[Pair]:
    """Return the pairs of all ``*test*.py`` below the folder, each once, where both sides are one formula."""
    pairs = []
    for path in sorted(folder.rglob("*test*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeError):  # of another language's or version's
            continue
        for node in ast.walk(tree):
            for gold, answer, expected in _cases(node):
                contents = [_formula(text) for text in (gold, answer)]
                if None not in contents:
                    pairs.append(Pair(path.stem, (str(contents[0]),), str(contents[1]), expected))
    return list(dict.fromkeys(pairs))


def _cases(node: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """Return (gold, answer, verdict) of each case in one node."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize" and len(node.args) > 1:
        names = ast.unparse(node.args[0]).replace("'", "").split(",")
        if [name.strip(" ()") for name in names[:2]] == ["gold", "pred"] and len(names) == 3:
            for row in getattr(node.args[1], "elts", []):
                try:
                    gold, answer, expected = ast.literal_eval(row)
                except ValueError:
                    continue
                if expected in (0, 1):
                    yield gold, answer, bool(expected)
    elif isinstance(node, ast.FunctionDef):
        texts = [
            statement.value.value
            for statement in node.body
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        ]
        said = [
            statement.value.func.attr
            for statement in node.body
            if isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and isinstance(statement.value.func, ast.Attribute)
        ]
        if (
            len(texts) == 2
            and all(isinstance(text, str) for text in texts)
            and said in (["assertTrue"], ["assertFalse"])
        ):
            yield str(texts[0]), str(texts[1]), said == ["assertTrue"]


def _formula(text: str) -> str | None:
    r"""Return the content of a text that is one ``$...$``, or one box in it."""
    inner = re.fullmatch(r"\s*(?:\$\$?|\\\[|\\\()?([^$]*?)(?:\$\$?|\\\]|\\\))?\s*", text, re.DOTALL)
    if inner is None:
        return None
    content = inner[1].strip()
    boxed = re.fullmatch(r"\\boxed\{(.*)\}", content, re.DOTALL)
    if boxed:
        content = boxed[1]
    return None if "boxed" in content or not content or len(content) > _MAX_CHARS or "\n" in content else content
