"""Adds the imports that graders put before a submission, where it needs them.

LeetCode's and LiveCodeBench's harnesses execute a long list of star imports first, and models rely on it: they use
``List``, ``defaultdict``, ``inf`` without importing them. All those imports cost tens of milliseconds per test, so only
the names that a program uses and never binds are imported.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Mapping, Set
from functools import cache

RECURSION_LIMIT = 50_000
"""The recursion limit of LiveCodeBench's harness."""

_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
"""The order of the star imports: of two equal names the later wins, and modules win over all."""


@cache
def _statements() -> Mapping[str, str]:
    """Return, for each name, the statement that imports it."""
    found: dict[str, str] = {}
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        found |= {name: f"from {module_name} import {name}" for name in public if not hasattr(builtins, name)}
    return found | {name: f"import {name}" for name in _MODULES}


def missing_imports(tree: ast.Module, given: Set[str] = frozenset()) -> str:
    """Return import statements, on one line, for the well-known names that ``tree`` uses and never binds.

    ``given`` are names that are bound elsewhere.
    """
    used, bound = names_of(tree)
    return "; ".join(_statements()[name] for name in used if name not in bound | given and name in _statements())


def module_imports(tree: ast.Module) -> str:
    """Return, on one line, imports of well-known modules that ``tree`` uses as ``module.name`` but does not import."""
    _, bound = names_of(tree)
    used = {
        node.value.id: None
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    found = [f"import {name}" for name in used if name in _MODULES and name not in bound]
    return "; ".join(found) + "\n" if found else ""


def with_imports(source: str, prefix: str = "") -> str:
    """Return the source with the graders' recursion limit and the imports that it and ``prefix`` lack.

    ``prefix`` runs before it. The added line comes after the ``from __future__`` statements. Raises SyntaxError.
    """
    tree = ast.parse(source)
    given = names_of(ast.parse(prefix))[1] if prefix else frozenset()
    added = [f"__import__('sys').setrecursionlimit({RECURSION_LIMIT})", missing_imports(tree, given)]
    position = 0
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            position = statement.end_lineno or 0
    lines = source.split("\n")
    return "\n".join([*lines[:position], "; ".join(filter(None, added)), *lines[position:]])


def names_of(tree: ast.AST) -> tuple[list[str], set[str]]:
    """Return (the names that are read, in order; the names that are bound, also by star imports)."""
    used: dict[str, None] = {}
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used[node.id] = None
            else:
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            bound |= {name for name, text in _statements().items() if text.startswith(f"from {node.module} ")}
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return list(used), bound
