"""Adds to a submission the missing imports that graders provide, such as ``List`` or ``defaultdict``.

LeetCode's and LiveCodeBench's harnesses execute a long list of star imports before a submission, and models rely on
them. The whole list would cost tens of milliseconds per test, so only names that a program uses and never binds are
imported.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
import sys
from collections.abc import Mapping
from functools import cache

RECURSION_LIMIT = 50_000
"""Recursion limit of submissions: that of LiveCodeBench's harness."""

MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)  # fmt: skip
"""Modules whose names are provided; of two with the same name, the later one. A module's name means the module."""


@cache
def _statement_by_name() -> Mapping[str, str]:
    statements: dict[str, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        statements |= {name: f"from {module_name} import {name}" for name in public if not hasattr(builtins, name)}
    return statements | {name: f"import {name}" for name in MODULES}


def names_of(source: str) -> tuple[list[str], set[str]]:
    """Return (the module-level names that ``source`` uses and never binds, the module-level names that it binds).

    The used names include built-in ones. Methods and local variables bind no module-level name; star imports of
    well-known modules do. Both results are empty for a source that does not compile.
    """
    try:
        module = symtable.symtable(source, "source", "exec")
    except (SyntaxError, RecursionError):
        return [], set()
    used: dict[str, None] = {}
    bound: set[str] = set()
    if "*" in source:
        bound = {name for node in ast.walk(ast.parse(source)) for name in _star_names(node)}
    scopes = [module]
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            in_module = scope is module or symbol.is_declared_global()
            if in_module and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
            elif symbol.is_referenced() and (in_module or symbol.is_global()):
                used[symbol.get_name()] = None
    return [name for name in used if name not in bound], bound


def with_imports(source: str, prefix: str = "") -> str:
    """Return a submission's source with the graders' recursion limit and the provided imports that it lacks.

    ``prefix`` is a program that runs before the submission, with imports of its own. The additions come after a
    docstring and ``from __future__`` statements. Raises SyntaxError.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # as Python counts lines
    given, statements = names_of(prefix)[1], _statement_by_name()
    missing = [name for name in names_of(source)[0] if name in statements and name not in given]
    limit = f"__import__('sys').setrecursionlimit({RECURSION_LIMIT})"
    added = "; ".join((limit, *(statements[name] for name in missing)))
    first = [node for number, node in enumerate(ast.parse(source).body) if _must_come_first(node, number)]
    if not first:
        return f"{added}\n{source}"
    lines = source.encode().split(b"\n")
    line, column = (first[-1].end_lineno or 1) - 1, first[-1].end_col_offset or 0
    lines[line] = lines[line][:column] + f"; {added}".encode() + lines[line][column:]
    return b"\n".join(lines).decode()


def _must_come_first(node: ast.stmt, number: int) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text and number == 0


def modules_of(source: str) -> set[str]:
    """Return the top-level modules that ``source`` imports outside ``try``, except the standard library's."""
    tree = ast.parse(source)
    tried = {part for node in ast.walk(tree) if isinstance(node, ast.Try) for part in ast.walk(node)}
    names: set[str] = set()
    for node in set(ast.walk(tree)) - tried:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def has_unknown_star(tree: ast.AST) -> bool:
    """Return whether a program has a star import of a module that is not well known, so that it may bind any name."""
    stars = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return any(not _star_names(node) for node in stars)


def _star_names(node: ast.AST) -> set[str]:
    """Return the names that a node binds if it is a star import of a well-known module; else an empty set."""
    if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*":
        return set()
    return {name for name, text in _statement_by_name().items() if text.startswith(f"from {node.module} ")}
