"""Tests written as Python: asserts over the submission's names, and LeetCode's ``check(candidate)``.

They never run beside the submission, which could read what they expect. The statements of a row are one program, which
runs in a sandbox of its own, and its calls travel to the submission's as data (``code.in_sandbox.program_runner``).

Tests by which a submission could judge itself are refused when the data is loaded, such as ``assert same(f(1), [2])``
with ``same`` defined nowhere: a function of the submission would judge a result of the submission.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Collection, Mapping
from typing import Any

from or1_verify.code.imports import MODULES, has_unknown_star, names_of
from or1_verify.code.tests import ProgramTest, is_call_name

_HELPERS = frozenset({"ListNode", "TreeNode", "list_node", "tree_node", "is_same_list", "is_same_tree"})


def assert_tests(cases: Any) -> tuple[ProgramTest, ...]:
    """Return the tests of an ``assert_case``. Raises ValueError."""
    if isinstance(cases, str):
        cases = [cases]
    if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
        raise ValueError(f"assert_case: found {cases!r:.100}, expected assert statements as text, or a list of such")
    statements = [node for n, case in enumerate(cases) for node in _parse(f"assert_case[{n}]", case).body]
    if not statements:
        return ()
    module = ast.Module(statements, [])
    program = ast.unparse(module)
    unbound = [name for name in names_of(program)[0] if not hasattr(builtins, name) and name not in _HELPERS]
    modules = [name for name in unbound if name in MODULES and name in _owners(module)]
    remote = set(unbound) - set(modules)
    _check_program("assert_case", module, remote)
    imports = "".join(f"import {name}\n" for name in modules)
    return (ProgramTest("asserts", imports + program, {name: name for name in sorted(remote)}),)


def check_tests(decoded: Mapping[str, Any]) -> tuple[ProgramTest, ...]:
    """Return the tests of ``{entry_point, import_prefix, test_code, helpers?}``. Raises ValueError."""
    for key in ("entry_point", "import_prefix", "test_code"):
        if not isinstance(decoded.get(key), str):
            raise ValueError(f"{key}: found {decoded.get(key)!r:.100}, expected a string beside test_code")
    if not is_call_name(decoded["entry_point"]):
        raise ValueError(f"entry_point: found {decoded['entry_point']!r:.100}, expected 'f' or 'Solution().f'")
    prefix = _parse("import_prefix", decoded["import_prefix"])
    module = _parse("test_code", decoded["test_code"])
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or [argument.arg for argument in checks[0].args.args] != ["candidate"]:
        raise ValueError("test_code: expected it to define one function check(candidate)")
    entry_point = decoded["entry_point"].rpartition(".")[2]
    given = names_of(decoded["import_prefix"])[1] - {entry_point}  # a prompt may hold its first lines
    helpers = _helpers(decoded.get("helpers"), decoded["test_code"], given, has_unknown_star(prefix))
    _check_program("test_code", module, {"candidate", *helpers})
    _check_helpers(module, {"candidate", entry_point}, set(helpers))
    program = decoded["test_code"] + "\ncheck(candidate)"
    stand_ins = {name: name for name in helpers} | {"candidate": decoded["entry_point"]}
    return (ProgramTest("check", program, stand_ins),)


def _helpers(listed: Any, test_code: str, given: set[str], any_given: bool) -> list[str]:
    """Return the submission's functions that the row lists for ``test_code``. ``given``: the names that the prefix
    binds; ``any_given``: the prefix may bind any other.

    Raises ValueError, naming all of them, for names that are bound or unused, and for used ones that nothing binds.
    """
    if listed is None:
        listed = []
    if not isinstance(listed, list) or not all(isinstance(name, str) and name.isidentifier() for name in listed):
        raise ValueError(f"helpers: found {listed!r:.100}, expected a list of names of functions")
    unbound = [name for name in names_of(test_code)[0] if not hasattr(builtins, name) and name not in _HELPERS]
    wrong = []
    for name in listed:
        if name in given:
            wrong.append(f"helpers: {name!r} is defined in import_prefix, and that is what test_code uses: not listed")
        elif name not in unbound:
            wrong.append(f"helpers: {name!r} is not a name that test_code uses without defining it")
    for name in () if any_given or has_unknown_star(ast.parse(test_code)) else unbound:
        if name not in given and name not in listed:
            wrong.append(f"test_code: {name!r} is not defined: expected in import_prefix, or listed in helpers")
    if wrong:
        raise ValueError("; ".join(wrong))
    return list(listed)


def _owners(module: ast.Module) -> set[str]:
    """Return the names whose attributes a program uses."""
    attributes = (node.value for node in ast.walk(module) if isinstance(node, ast.Attribute))
    return {value.id for value in attributes if isinstance(value, ast.Name)}


def _parse(where: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not Python ({error})") from None


def _check_program(where: str, module: ast.Module, remote: set[str]) -> None:
    """Raise ValueError when the program calls no submission, or would let it judge itself."""
    if not any(isinstance(node, ast.Name) and node.id in remote for node in ast.walk(module)):
        raise ValueError(f"{where}: uses nothing of the submission's; expected tests that call it")
    results = _results(module, lambda value, known: _has_result(value, remote, known))
    for node in ast.walk(module):
        if isinstance(node, ast.Assert) and _judged_inside(node.test, remote, results):
            raise ValueError(
                f"{where}: '{ast.unparse(node)[:200]}': a function of the submission would judge its own result and be "
                "shown what is expected; expected a comparison, such as `assert CALL == VALUE`"
            )


def _check_helpers(module: ast.Module, own: set[str], helpers: set[str]) -> None:
    """Raise ValueError where a helper, which is the submission's, may judge what the entry point returns.

    A helper must be called by its name in ``check`` itself, on nothing that the entry point returned or was given to
    change, and an assert must not compare the two. A helper's results may be the entry point's arguments.

    Args:
        own: the names of the entry point.
        helpers: those that the row lists.
    """
    judges, called = helpers - own, [node for node in ast.walk(module) if isinstance(node, ast.Call)]
    asserts = [node for node in ast.walk(module) if isinstance(node, ast.Assert)]
    tested = {id(part) for node in asserts for part in ast.walk(node)}
    changed = {
        item.id
        for node in called
        if _is_remote(node.func, own) and id(node) not in tested
        for item in _arguments(node)
        if isinstance(item, ast.Name)
    }
    results = _results(module, lambda value, known: _has_result(value, own, known), changed)
    judged = _results(module, lambda value, known: _is_judged(value, own, judges, known))
    nested = {id(part) for node in ast.walk(module) if _is_nested(node) for part in ast.walk(node)}
    safe = {
        id(node.func)
        for node in called
        if id(node) not in nested and not any(_has_result(item, own, results) for item in _arguments(node))
    }
    wrong = [node for node in ast.walk(module) if isinstance(node, ast.Name) and node.id in judges]
    judging = [node.id for node in wrong if id(node) not in safe]
    judging += [
        ast.unparse(node.test)[:200]
        for node in asserts
        if _has_result(node.test, own, results) and _is_judged(node.test, own, judges, judged)
    ]
    if judging:
        raise ValueError(
            f"helpers: '{judging[0]}': a function of the submission would judge the entry point's result; expected "
            "import_prefix to define what test_code judges by, and helpers that only make the entry point's arguments"
        )


def _is_nested(node: ast.AST) -> bool:
    """Whether ``node`` is a function or class besides ``check``: what its parameters hold is not known."""
    if isinstance(node, ast.FunctionDef):
        return node.name != "check"
    return isinstance(node, ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)


def _is_judged(node: ast.AST, own: set[str], judges: set[str], known: set[str]) -> bool:
    """Whether a value holds a helper's result, other than in the entry point's arguments."""
    if isinstance(node, ast.Call) and _is_remote(node.func, own):
        return False
    if isinstance(node, ast.Name):
        return node.id in judges | known
    return any(_is_judged(part, own, judges, known) for part in ast.iter_child_nodes(node))


def _results(module: ast.Module, holds: Callable[[ast.expr, set[str]], bool], known: Collection[str] = ()) -> set[str]:
    """Return ``known`` and the variables to which the module assigns, whole or in part, a value that ``holds``
    something. The value may hold it through a variable of the result."""
    variables = set(known)
    bindings = [pair for node in ast.walk(module) for pair in _bindings(node)]
    while True:
        more = {
            part.id
            for target, value in bindings
            if holds(value, variables)
            for part in ast.walk(target)
            if isinstance(part, ast.Name)
        }
        if more <= variables:
            return variables
        variables |= more


def _bindings(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return (what gets a value, the value) of an assignment, a loop or a method's argument: ``a.append(f(1))``."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return [] if node.value is None else [(node.target, node.value)]
    if isinstance(node, ast.For | ast.comprehension):
        return [(node.target, node.iter)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return [(node.func.value, item) for item in node.args]
    return []


def _has_result(node: ast.expr, remote: set[str], results: set[str]) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in results)
        or (isinstance(part, ast.Call) and _is_remote(part.func, remote))
        for part in ast.walk(node)
    )


def _judged_inside(test: ast.expr, remote: set[str], results: set[str]) -> bool:
    """Whether the submission decides the truth of ``test``: by a call about one of its results, or by comparing its
    results only with each other. ``results``: the variables that hold one."""
    if isinstance(test, ast.BoolOp):
        return any(_judged_inside(value, remote, results) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _judged_inside(test.operand, remote, results)
    if isinstance(test, ast.Compare):
        sides = (test.left, *test.comparators)
        if any(isinstance(item, ast.Constant) and isinstance(item.value, bool) for item in sides):
            return any(_judged_inside(item, remote, results) for item in sides)
        return all(isinstance(item, ast.Call) and _is_remote(item.func, remote) for item in sides)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in ("all", "any", "bool"):
        items = [item.elt if isinstance(item, ast.GeneratorExp | ast.ListComp) else item for item in test.args]
        return any(_judged_inside(item, remote, results) for item in items)
    if not isinstance(test, ast.Call) or not _is_remote(test.func, remote):
        return False
    return any(_has_result(item, remote, results) for item in _arguments(test))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_remote(function: ast.expr, remote: set[str]) -> bool:
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return isinstance(function, ast.Name) and function.id in remote
