"""Parses and validates the ground truths of code problems, and makes test records of them.

A ground truth is one JSON object (docs/recipe.md, section 7); docs/code_verifier.md lists its keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from or1_verify.code import livecodebench
from or1_verify.code.asserts import assert_tests, check_tests
from or1_verify.code.checkers import Checker, parse_checker
from or1_verify.code.code_tests import CallTest, CodeTest, CodeTests, StdinTest, is_call_name
from or1_verify.sandbox.limits import ProblemLimits

_KINDS = (
    "expected one of {inputs, outputs, fn_name?}, {assert_case}, {entry_point, import_prefix, test_code}, "
    "{public_test_cases, private_test_cases, metadata}"
)
_LEAST_MEMORY_BYTES = 64 << 20  # below it Python itself would run out, and the submission would be blamed


def parse_code_tests(ground_truth: str) -> CodeTests:
    """Return the tests in a ground truth. Raises ValueError (not JSON, unknown kind, no tests, ...) with the reason."""
    try:
        decoded = json.loads(ground_truth)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); {_KINDS}") from None
    if not isinstance(decoded, dict):
        raise ValueError(f"found the JSON of a {type(decoded).__name__}; {_KINDS}")
    try:
        return _tests_of(decoded)
    except RecursionError:
        raise ValueError("nested too deeply to be read; expected tests of fewer levels, or shorter sums") from None


def _tests_of(decoded: dict[str, Any]) -> CodeTests:
    if "public_test_cases" in decoded or "private_test_cases" in decoded:
        kept = {name: decoded.get(name) for name in ("checker", "tolerance", "limits")}
        decoded = {**livecodebench.as_input_output(decoded), **kept}
    if decoded.get("tolerance") is not None:
        if decoded.get("checker") is not None:
            raise ValueError("tolerance: found beside checker; expected it inside: {kind: float, tolerance: ...}")
        decoded["checker"] = {"kind": "float", "tolerance": decoded["tolerance"]}
    if isinstance(decoded.get("functional"), str):
        decoded |= _of_code_r1(decoded["functional"])
    limits = _limits(decoded.get("limits"))
    if "test_code" in decoded:
        _no_checker(decoded)
        return CodeTests(check_tests(decoded), Checker("json"), decoded["import_prefix"], limits=limits)
    if "inputs" not in decoded and "assert_case" not in decoded:
        raise ValueError(f"unknown kind: an object with keys {sorted(decoded)}; {_KINDS}")
    tests: tuple[CodeTest, ...] = ()
    checker = Checker("json")
    if decoded.get("inputs") or decoded.get("outputs"):
        checker = parse_checker(decoded.get("checker"), calls=bool(decoded.get("fn_name")))
        tests = _input_output(decoded, checker)
    else:
        _no_checker(decoded)
    tests += assert_tests(decoded.get("assert_case") or [])
    if not tests:
        raise ValueError("no tests: inputs, outputs and assert_case are empty; expected at least one")
    starter = decoded.get("starter_code") or ""
    if not isinstance(starter, str):
        raise ValueError(f"starter_code: found {starter!r:.100}, expected source")
    return CodeTests(tests, checker, starter=starter, limits=limits)


def _of_code_r1(program: str) -> dict[str, Any]:
    """Return our keys for ``program``, code-r1's key ``functional``. It ends in check(entry point), or has asserts."""
    test, call, entry = program.rstrip().removesuffix(")").rpartition("\ncheck(")
    if not call:
        return {"assert_case": [program]}
    return {"entry_point": entry.strip(), "import_prefix": "", "test_code": test}


def _limits(value: Any) -> ProblemLimits:
    if value is None:
        return ProblemLimits()
    if not isinstance(value, dict) or not value.keys() <= {"time_s", "memory_bytes"}:
        raise ValueError(f"limits: found {value!r:.100}, expected an object with time_s, memory_bytes or both")
    time_s, memory_bytes = value.get("time_s"), value.get("memory_bytes")
    wrong = []
    if time_s is not None and (type(time_s) not in (int, float) or not 0 < time_s < math.inf):
        wrong.append(f"limits.time_s: found {time_s!r:.100}, expected seconds above 0")
    if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes < _LEAST_MEMORY_BYTES):
        wrong.append(
            f"limits.memory_bytes: found {memory_bytes!r:.100}, expected an integer of at least {_LEAST_MEMORY_BYTES}"
        )
    if wrong:
        raise ValueError("; ".join(wrong))
    return ProblemLimits(time_s, memory_bytes)


def _no_checker(decoded: Mapping[str, Any]) -> None:
    if decoded.get("checker") is not None:
        raise ValueError(
            "checker: a row whose tests compare for themselves has none, nor a tolerance; expected beside inputs only"
        )


def _input_output(decoded: Mapping[str, Any], checker: Checker) -> tuple[CodeTest, ...]:
    inputs, outputs, fn_name = decoded.get("inputs", []), decoded.get("outputs", []), decoded.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        types = f"{type(inputs).__name__} and {type(outputs).__name__}"
        raise ValueError(f"inputs and outputs: found {types}, expected two lists")
    if len(inputs) != len(outputs):
        raise ValueError(f"mismatched: {len(inputs)} inputs, {len(outputs)} outputs; expected as many of each")
    if fn_name and not (isinstance(fn_name, str) and is_call_name(fn_name)):
        raise ValueError(f"fn_name: found {fn_name!r}, expected the name of a function")
    pairs = enumerate(zip(inputs, outputs, strict=True))
    if fn_name:
        return tuple(_call_test(n, given, wanted, fn_name, checker) for n, (given, wanted) in pairs)
    return tuple(_stdin_test(n, given, wanted, checker) for n, (given, wanted) in pairs)


def _stdin_test(number: int, given: Any, wanted: Any, checker: Checker) -> StdinTest:
    stdin = _text("inputs", given, number).encode("utf-8", "surrogatepass")
    expected: str | tuple[str, ...]
    if checker.kind == "any_of":
        _check_several(number, wanted)
        expected = tuple(_text("outputs", one, number) for one in wanted)
    else:
        expected = _text("outputs", wanted, number)
    return StdinTest(f"test {number}", stdin, expected)


def _check_several(number: int, wanted: Any) -> None:
    if not isinstance(wanted, list) or not wanted:
        raise ValueError(f"outputs[{number}]: found {wanted!r:.100}, expected for any_of a list of accepted outputs")


def _text(side: str, value: Any, number: int) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{side}[{number}]: found a {type(value).__name__}, expected text or a list of lines")
    return value


def _call_test(number: int, given: Any, wanted: Any, fn_name: str, checker: Checker) -> CallTest:
    wrapped = False
    if isinstance(given, str):  # one JSON value per line; the output is JSON text too
        arguments = [_json(f"inputs[{number}]", line) for line in given.split("\n") if line.strip()]
        expected = _json(f"outputs[{number}]", wanted)
    elif isinstance(given, list):
        arguments, expected = given, wanted
        wrapped = checker.kind == "json" and isinstance(wanted, list) and len(wanted) == 1
    else:
        raise ValueError(
            f"inputs[{number}]: found a {type(given).__name__}, expected arguments as a list or as JSON lines"
        )
    if checker.kind == "any_of":
        _check_several(number, expected)
    return CallTest(f"test {number}", fn_name, arguments, expected, wrapped)


def _json(where: str, text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one JSON value per line") from None
