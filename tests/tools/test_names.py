"""House rules on names that no linter has: one class per name, and docstrings that begin with a subject or a verb."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "or1_megatron"


def test_a_class_name_is_used_once_and_no_docstring_begins_with_of() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    of = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            where = f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.ClassDef):
                places[node.name].append(where)
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and str(node.value.value)[:3] == "Of "
            ):
                of.append(where)
    assert len(places) > 500  # it looked at the package
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    assert of == []
