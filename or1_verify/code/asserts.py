"""Reads tests written as Python: assert statements that call the submission, and LeetCode's ``check(candidate)``.

The tests never run in the submission's process, which could read the expected values. A problem's statements are one
program, which runs in a sandbox of its own; the program's calls go to the submission's sandbox as data
(``code.in_sandbox.program_runner``). Tests by which a submission could judge itself are refused when data is loaded.
An example is ``assert same(f(1), [2])`` without a definition of ``same``, because the submission could define ``same``.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from typing import Any

from or1_verify.code.code_tests import ProgramTest, is_call_name
from or1_verify.code.missing_imports import MODULES, has_unknown_star, names_of

_HELPERS = frozenset({"ListNode", "TreeNode", "list_node", "tree_node", "is_same_list", "is_same_tree"})


def assert_tests(cases: Any) -> tuple[ProgramTest, ...]:
    """Return the test program made of the ground truth's key ``assert_case``. Raises ValueError if it is unusable."""
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
    modules = [name for name in unbound if name in MODULES and name in _names_with_attributes(module)]
    remote = set(unbound) - set(modules)
    _check_program("assert_case", module, remote)
    imports = "".join(f"import {name}\n" for name in modules)
    return (ProgramTest("asserts", imports + program, {name: name for name in sorted(remote)}),)


def check_tests(decoded: Mapping[str, Any]) -> tuple[ProgramTest, ...]:
    """Return the test program made of the keys entry_point, import_prefix and test_code, or raise ValueError."""
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
    unbound = [name for name in names_of(decoded["test_code"])[0] if not hasattr(builtins, name)]
    given = _HELPERS | names_of(decoded["import_prefix"])[1] | {entry_point}
    wrong = [f"{name!r} is not defined: expected in import_prefix" for name in unbound if name not in given]
    if wrong and not has_unknown_star(prefix) and not has_unknown_star(module):
        raise ValueError(f"test_code: {'; '.join(wrong)}")
    own_name = {entry_point} & set(unbound) - _whole_functions(prefix)  # some tests call it by its own name, too
    tested = {"candidate"} | own_name
    _check_program("test_code", module, tested)
    program = decoded["test_code"] + "\ncheck(candidate)"
    return (ProgramTest("check", program, dict.fromkeys(tested, decoded["entry_point"])),)


def _whole_functions(module: ast.Module) -> set[str]:
    """Return the names of a module's functions whose body is more than ``pass`` or a docstring."""
    return {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        and not all(
            isinstance(part, ast.Pass) or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            for part in node.body
        )
    }


def _names_with_attributes(module: ast.Module) -> set[str]:
    attributes = (node.value for node in ast.walk(module) if isinstance(node, ast.Attribute))
    return {value.id for value in attributes if isinstance(value, ast.Name)}


def _parse(where: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not Python ({error})") from None


def _check_program(where: str, module: ast.Module, remote: set[str]) -> None:
    """Raise ValueError if a test program does not call the submission, or would let the submission judge itself."""
    if not any(isinstance(node, ast.Name) and node.id in remote for node in ast.walk(module)):
        raise ValueError(f"{where}: uses nothing of the submission's; expected tests that call it")
    results = _results(module, remote)
    asserts = [node for node in ast.walk(module) if isinstance(node, ast.Assert)]
    for node in asserts:
        if _judged_inside(node.test, remote, results):
            raise ValueError(
                f"{where}: '{ast.unparse(node)[:200]}': a function of the submission would judge its own result and be "
                "shown what is expected; expected a comparison, such as `assert CALL == VALUE`"
            )
    if asserts and all(_compares_results(node.test, remote, results) for node in asserts):
        raise ValueError(
            f"{where}: compares results of the submission only with each other, as '{ast.unparse(asserts[0])[:200]}': "
            "it would judge its own result; expected a comparison with a value, such as `assert CALL == VALUE`"
        )


def _results(module: ast.Module, remote: set[str]) -> set[str]:
    """Return the variables of a test program whose value is, or contains, a result of the submission."""
    variables: set[str] = set()
    bindings = [pair for node in ast.walk(module) for pair in _bindings(node)]
    while True:
        more = {
            part.id
            for target, value in bindings
            if _has_result(value, remote, variables)
            for part in ast.walk(target)
            if isinstance(part, ast.Name)
        }
        if more <= variables:
            return variables
        variables |= more


def _bindings(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the pairs (target, value) of an assignment, loop or method call: (a, f(1)) for ``a.append(f(1))``."""
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
    """Return whether the submission alone decides if ``test`` holds.

    It does if a function of the submission gets a result of the submission, or if all sides of a comparison are calls
    of the submission. ``results``: the variables that hold results of the submission.
    """
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
    arguments = [*test.args, *(keyword.value for keyword in test.keywords)]
    return any(_has_result(item, remote, results) for item in arguments)


def _compares_results(test: ast.expr, remote: set[str], results: set[str]) -> bool:
    """Return whether each side of a comparison contains a result, so that the submission may agree with itself."""
    return isinstance(test, ast.Compare) and all(
        _has_result(item, remote, results) for item in (test.left, *test.comparators)
    )


def _is_remote(function: ast.expr, remote: set[str]) -> bool:
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return isinstance(function, ast.Name) and function.id in remote
