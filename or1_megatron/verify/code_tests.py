"""The ground truths of code problems: read, validated at load, and turned into tests that hide what they expect.

Three kinds (RECIPE section 7), each one JSON object:

- ``{inputs, outputs}``: standard input and output; with ``fn_name``, arguments and results of a call.
- ``{assert_case}``: a list of ``assert`` statements.
- ``{entry_point, import_prefix, test_code}``: LeetCode's, where ``test_code`` defines ``check(candidate)``.

An assert is not run as it stands, since its expectation would sit beside the submission. It is split: the side that
calls the submission is evaluated in the sandbox, the other, which must be a literal, stays outside. What cannot be
split so (``abs(f(1) - 2) < 1e-6``, two calls compared with each other, statements between the asserts) is refused
when the data is loaded, rather than run in a way that a submission could cheat.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

Comparison = Literal["lines", "json", "python", "list_node", "tree_node"]
"""How an output is judged. lines: text, token by token in each line; json: a call's result, tuples as lists, floats
to 1e-9; python: as ``==`` does; list_node, tree_node: the values of LeetCode's structures."""

_KINDS = "expected one of {inputs, outputs, fn_name?}, {assert_case}, {entry_point, import_prefix, test_code}"
_NODE_CHECKS: Mapping[str, tuple[str, Comparison]] = {
    "is_same_list": ("list_node", "list_node"),
    "is_same_tree": ("tree_node", "tree_node"),
}


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: what the sandbox is given (``request``, ``stdin``), and what stays outside."""

    name: str
    request: Mapping[str, Any]
    stdin: bytes
    expected: Any
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class CodeTests:
    """All tests of one problem; ``prefix`` is source that stands before the submission's."""

    prefix: str
    tests: tuple[CodeTest, ...]


def parse_code_tests(ground_truth: str) -> CodeTests:
    """Raises ValueError naming what is wrong: not JSON, unknown kind, no tests, mismatched inputs and outputs, ..."""
    try:
        decoded = from_json(ground_truth)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); {_KINDS}") from None
    if not isinstance(decoded, dict):
        raise ValueError(f"found the JSON of a {type(decoded).__name__}; {_KINDS}")
    if "test_code" in decoded:
        return _check_program(decoded)
    if "inputs" not in decoded and "assert_case" not in decoded:
        raise ValueError(f"unknown kind: an object with keys {sorted(decoded)}; {_KINDS}")
    tests = _input_output(decoded) + _assert_cases(decoded.get("assert_case") or [])
    if not tests:
        raise ValueError("no tests: inputs, outputs and assert_case are empty; expected at least one")
    return CodeTests("", tests)


def _input_output(decoded: Mapping[str, Any]) -> tuple[CodeTest, ...]:
    inputs, outputs, fn_name = decoded.get("inputs", []), decoded.get("outputs", []), decoded.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        found = f"{type(inputs).__name__} and {type(outputs).__name__}"
        raise ValueError(f"inputs and outputs: found {found}, expected two lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"mismatched: {len(inputs)} inputs, {len(outputs)} outputs; expected as many of each")
    if fn_name and not isinstance(fn_name, str):
        raise ValueError(f"fn_name: found {fn_name!r}, expected the name of a function")
    make = _call_test if fn_name else _stdin_test
    return tuple(make(n, given, wanted, fn_name) for n, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)))


def _stdin_test(number: int, given: Any, wanted: Any, _: str | None) -> CodeTest:
    stdin, expected = (_text(side, value, number) for side, value in (("inputs", given), ("outputs", wanted)))
    return CodeTest(f"test {number}", {"kind": "stdin"}, stdin.encode("utf-8", "surrogatepass"), expected, "lines")


def _text(side: str, value: Any, number: int) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{side}[{number}]: found a {type(value).__name__}, expected text or a list of lines")
    return value


def _call_test(number: int, given: Any, wanted: Any, fn_name: str | None) -> CodeTest:
    if isinstance(given, str):  # one JSON value per line; the output is JSON text too
        arguments = [_json(f"inputs[{number}]", line) for line in given.split("\n") if line.strip()]
        expected = _json(f"outputs[{number}]", wanted)
    elif isinstance(given, list):
        arguments, expected = given, wanted
    else:
        raise ValueError(
            f"inputs[{number}]: found a {type(given).__name__}, expected arguments as a list or as JSON lines"
        )
    return CodeTest(f"test {number}", _evaluate(fn_name, None, arguments), b"", expected, "json")


def _json(where: str, text: Any) -> Any:
    try:
        return from_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one JSON value per line") from None


def _assert_cases(cases: Any) -> tuple[CodeTest, ...]:
    if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
        raise ValueError(f"assert_case: found {cases!r:.100}, expected a list of assert statements as strings")
    statements = [node for n, case in enumerate(cases) for node in _parse(f"assert_case[{n}]", case).body]
    return tuple(_assert_test(n, node, None) for n, node in enumerate(statements))


def _check_program(decoded: Mapping[str, Any]) -> CodeTests:
    for key in ("entry_point", "import_prefix", "test_code"):
        if not isinstance(decoded.get(key), str):
            raise ValueError(f"{key}: found {decoded.get(key)!r:.100}, expected a string beside test_code")
    _parse("import_prefix", decoded["import_prefix"])
    module = _parse("test_code", decoded["test_code"])
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or [argument.arg for argument in checks[0].args.args] != ["candidate"]:
        raise ValueError("test_code: expected it to define one function check(candidate)")
    tests = tuple(_assert_test(n, node, decoded["entry_point"]) for n, node in enumerate(checks[0].body))
    return CodeTests(decoded["import_prefix"] + "\n\n", tests)


def _parse(where: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: not Python ({error})") from None


def _assert_test(number: int, node: ast.stmt, entry_point: str | None) -> CodeTest:
    split = _split(node.test) if isinstance(node, ast.Assert) else None
    if split is None:
        raise ValueError(
            f"statement {number}, '{ast.unparse(node)[:200]}': expected `assert CALL == LITERAL`; any other form would "
            "show the expectation to the submission"
        )
    expression, expected, comparison = split
    return CodeTest(f"assert {number}", _evaluate(entry_point, expression, None), b"", expected, comparison)


def _split(test: ast.expr) -> tuple[str, Any, Comparison] | None:
    """(expression for the sandbox, expected value, how to compare), or None when that cannot be had.

    It cannot when no side is a literal, and when the side that would go into the sandbox compares by itself: the
    submission's objects decide there what they are equal to.
    """
    split = _split_sides(test)
    if split is None or any(isinstance(node, ast.Compare | ast.BoolOp) for node in ast.walk(ast.parse(split[0]))):
        return None
    return split


def _split_sides(test: ast.expr) -> tuple[str, Any, Comparison] | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _is_submission_call(test.operand):
        return f"bool({ast.unparse(test.operand)})", False, "python"
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        # `is` is only ever meant for True, False and None, whose types the JSON comparison keeps apart
        how: Comparison = "python" if isinstance(test.ops[0], ast.Eq) else "json"
        left, right = test.left, test.comparators[0]
        for asked, wanted in ((left, right), (right, left)):
            literal = _literal(wanted)
            if literal is not None and _literal(asked) is None:
                return ast.unparse(asked), literal[0], how
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and len(test.args) == 2:
        maker, comparison = _NODE_CHECKS.get(test.func.id, ("", "python"))
        asked, wanted = test.args
        if maker and isinstance(wanted, ast.Call) and ast.unparse(wanted.func) == maker and len(wanted.args) == 1:
            literal = _literal(wanted.args[0])
            return None if literal is None else (ast.unparse(asked), literal[0], comparison)
    if _is_submission_call(test):
        return f"bool({ast.unparse(test)})", True, "python"
    return None


def _is_submission_call(node: ast.expr) -> bool:
    """A plain call of what can only be the submission's: with literal arguments, so nothing is compared inside."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or hasattr(builtins, node.func.id):
        return False
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    return node.func.id not in _NODE_CHECKS and all(_literal(argument) is not None for argument in arguments)


def _literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, boxed in a tuple (it may be None itself); None for anything else."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def _evaluate(entry_point: str | None, expression: str | None, arguments: list[Any] | None) -> Mapping[str, Any]:
    return {"kind": "evaluate", "entry_point": entry_point, "expression": expression, "arguments": arguments}
