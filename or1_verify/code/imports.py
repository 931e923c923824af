"""Adds the imports that graders put before a submission, where it needs them.

LeetCode's and LiveCodeBench's harnesses execute a long list of star imports first, and models rely on it: they use
``List``, ``defaultdict``, ``inf`` without importing them. All those imports cost tens of milliseconds per test, so only
the names that a program uses and never binds are imported.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
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
    statements: dict[str, str] = {}
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        statements |= {name: f"from {module_name} import {name}" for name in public if not hasattr(builtins, name)}
    return statements | {name: f"import {name}" for name in _MODULES}


def missing_imports(source: str, given: Set[str] = frozenset()) -> str:
    """Return import statements, on one line, for the well-known names that ``source`` uses and never binds.

    ``given`` are names that are bound elsewhere. Returns "" for a source that does not compile.
    """
    return "; ".join(
        _statements()[name] for name in unbound_names(source) if name in _statements() and name not in given
    )


def unbound_names(source: str) -> list[str]:
    """Return the names that ``source`` looks up in its module, but that no statement of it binds there.

    Built-in ones are among them. Names of methods and local variables bind nothing in the module. Names from star
    imports count as bound where the module is a well-known one.
    """
    try:
        module = symtable.symtable(source, "source", "exec")
    except (SyntaxError, RecursionError):
        return []
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
    return [name for name in used if name not in bound]


def module_imports(tree: ast.Module) -> str:
    """Return, on one line, imports of well-known modules that ``tree`` uses as ``module.name`` but does not import."""
    _, bound = names_of(tree)
    used = {
        node.value.id: None
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    statements = [f"import {name}" for name in used if name in _MODULES and name not in bound]
    return "; ".join(statements) + "\n" if statements else ""


def with_imports(source: str, prefix: str = "") -> str:
    """Return the source with the graders' recursion limit and the imports that it and ``prefix`` lack.

    ``prefix`` runs before it. What is added follows the docstring and the ``from __future__`` statements. Raises
    SyntaxError.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # as Python counts lines
    given = names_of(ast.parse(prefix))[1] if prefix else frozenset()
    added = "; ".join(
        filter(None, (f"__import__('sys').setrecursionlimit({RECURSION_LIMIT})", missing_imports(source, given)))
    )
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
        elif star := _star_names(node):
            bound |= star
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return list(used), bound


def has_unknown_star(tree: ast.AST) -> bool:
    """Whether ``tree`` imports all names of a module that is not a well-known one, so that any name may be bound."""
    stars = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return any(not _star_names(node) for node in stars)


def _star_names(node: ast.AST) -> set[str]:
    """Return the names that a star import of a well-known module binds; none for any other node."""
    if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*":
        return set()
    return {name for name, text in _statements().items() if text.startswith(f"from {node.module} ")}
