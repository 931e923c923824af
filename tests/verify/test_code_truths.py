"""Ground truths of code problems, without any sandbox: what is read from them, refused, and kept from the submission.

Not proven here: that what is accepted runs (test_code_corpus.py), or that real data sets hold nothing else.
"""

from __future__ import annotations

import ast
import base64
import json
import pickle
import zlib
from typing import Any

import pytest
from code_corpus import compress

from or1_verify.code import livecodebench
from or1_verify.code.code_tests import CallTest, ProgramTest, StdinTest
from or1_verify.code.ground_truth import parse_code_tests
from or1_verify.code.missing_imports import with_imports
from or1_verify.sandbox.limits import ProblemLimits


def parsed(truth: Any) -> Any:
    return parse_code_tests(truth if isinstance(truth, str) else json.dumps(truth))


CHECK = {
    "entry_point": "f",
    "import_prefix": "",
    "test_code": "def check(candidate):\n    assert candidate(1) == 918273",
}
STDIN = {"inputs": ["1"], "outputs": ["2"]}
TEST = {"input": "3\n", "output": "9", "testtype": "stdin"}

BAD_TRUTHS = {
    "not json": ("{", "not JSON"),
    "a list": ('["1"]', "JSON of a list"),
    "unknown kind": ({"tests": []}, "unknown kind: an object with keys ['tests']"),
    "no tests": ({"inputs": [], "outputs": []}, "no tests"),
    "mismatch": ({"inputs": ["1"], "outputs": []}, "mismatched: 1 inputs, 0 outputs"),
    "inputs is text": ({"inputs": "1", "outputs": "2"}, "expected two lists"),
    "input is a number": ({"inputs": [1], "outputs": ["2"]}, "inputs[0]: found a int"),
    "call input not json": ({"inputs": ["a b"], "outputs": ["1"], "fn_name": "f"}, "inputs[0]: not JSON"),
    "nested deeply": ({"assert_case": ["assert f(1" + " + 1" * 900 + ") == 1"]}, "nested too deeply"),
    "no name": ({**STDIN, "fn_name": "f(x)"}, "expected the name of a function"),
    "assert is not python": ({"assert_case": ["assert f("]}, "assert_case[0]: not Python"),
    "two calls": ({"assert_case": ["assert f(1) == g(1)"]}, "judge its own result"),
    "wrapped calls": ({"assert_case": ["assert sorted(f(1)) == sorted(g(1))"]}, "judge its own result"),
    "by way of variables": ({"assert_case": ["a = f(1)\nb = g(1)\nassert a == b"]}, "judge its own result"),
    "difference": ({"assert_case": ["assert abs(f(1) - g(1)) < f(2)"]}, "judge its own result"),
    "helper of nobody": ({"assert_case": ["assert same(f(1), [2])"]}, "judge its own result"),
    "nothing called": ({"assert_case": ["assert 1 + 1 == 2"]}, "uses nothing of the submission's"),
    "no check": ({**CHECK, "test_code": "x = 1"}, "check(candidate)"),
    "empty check": ({**CHECK, "test_code": "def check(candidate):\n    pass"}, "uses nothing of the submission's"),
    "no entry point": ({"import_prefix": "", "test_code": "x = 1"}, "entry_point: found None"),
    "entry point": ({**CHECK, "entry_point": "f(1)"}, "entry_point: found 'f(1)'"),
    "unknown checker": ({**STDIN, "checker": "fuzzy"}, "checker: found 'fuzzy'"),
    "checker for calls": ({**STDIN, "checker": "unordered"}, "expected for standard input and output"),
    "checker of asserts": ({"assert_case": ["assert f() == 1"], "checker": "float"}, "compare for themselves"),
    "tolerance": ({**STDIN, "checker": {"kind": "float", "tolerance": "x"}}, "tolerance: found 'x'"),
    "tolerance of its own": ({**STDIN, "tolerance": "x"}, "tolerance: found 'x'"),
    "two tolerances": ({**STDIN, "tolerance": 1e-6, "checker": "float"}, "tolerance: found beside checker"),
    "tolerance of asserts": ({"assert_case": ["assert f() == 1"], "tolerance": 1e-6}, "compare for themselves"),
    "checker's key": ({**STDIN, "checker": {"kind": "float", "eps": 1}}, "unknown key 'eps'"),
    "no source": ({**STDIN, "checker": "python"}, "expected its 'source'"),
    "one answer": ({**STDIN, "checker": "any_of"}, "outputs[0]: found '2', expected for any_of"),
    "limits": ({**STDIN, "limits": [5]}, "limits: found [5], expected an object"),
    "limits' key": ({**STDIN, "limits": {"seconds": 5}}, "expected an object with time_s, memory_bytes"),
    "both limits": (
        {**STDIN, "limits": {"time_s": 0, "memory_bytes": 4.0}},
        "limits.time_s: found 0, expected seconds above 0; limits.memory_bytes: found 4.0, expected an integer",
    ),
    "true time": ({**STDIN, "limits": {"time_s": True}}, "limits.time_s: found True"),
    "little memory": ({**STDIN, "limits": {"memory_bytes": 1 << 20}}, "limits.memory_bytes: found 1048576"),
    "unbound names": (
        {**CHECK, "test_code": "def check(candidate):\n    assert poly(candidate(1)) == twice(1)"},
        "test_code: 'poly' is not defined: expected in import_prefix; 'twice' is not defined",
    ),
    "judged by its own name": (
        {**CHECK, "test_code": "def check(candidate):\n    assert candidate(1) == f(1)"},
        "judge its own result",
    ),
    "judged by way of variables": (
        {"assert_case": ["(a, b) = f(1), 2\nfor n in range(3):\n    c = a + n\n    assert same(c, 2)"]},
        "judge its own result",
    ),
    "judged by way of a loop": (
        {"assert_case": ["found = []\nfound.append(f(1))\nfor x in found:\n    assert same(x, 2)"]},
        "judge its own result",
    ),
    "judged for all": ({"assert_case": ["assert all(same(f(n), n) for n in range(3))"]}, "judge its own result"),
    "judged to be true": ({"assert_case": ["assert same(f(1), 2) is True"]}, "judge its own result"),
    "lcb test": ({"public_test_cases": '[{"input": 1}]'}, "public_test_cases[0]: found {'input': 1}"),
    "lcb mixed": ({"public_test_cases": [TEST, {**TEST, "testtype": "functional"}]}, "all 'stdin' or all 'functional'"),
    "lcb name": ({"public_test_cases": [{**TEST, "testtype": "functional"}]}, "no func_name"),
    "lcb packed": ({"private_test_cases": "AAAA"}, "neither JSON nor base64 of zlib"),
}


@pytest.mark.parametrize("case", BAD_TRUTHS)
def test_unusable_ground_truths_are_refused(case: str) -> None:
    truth, words = BAD_TRUTHS[case]
    with pytest.raises(ValueError) as caught:
        parsed(truth)
    assert words in str(caught.value)


def test_a_pickle_is_read_but_never_loaded() -> None:
    tests = [TEST, {**TEST, "input": "\u00e4 x" * 300}]
    assert json.loads(livecodebench.decompress(compress(tests))) == tests
    (first, second) = parsed({"private_test_cases": compress(tests)}).tests
    assert (first.stdin, first.expected) == (b"3\n", "9") and second.stdin.decode() == "\u00e4 x" * 300

    class Evil:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit('loaded')",))

    for loaded in (Evil(), [1], ["a", "b"], 3):
        packed = base64.b64encode(zlib.compress(pickle.dumps(loaded))).decode()
        with pytest.raises(ValueError, match="not loaded"):
            parsed({"private_test_cases": packed})


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "MAX_TEST_BYTES", 1 << 16)
    bomb = base64.b64encode(zlib.compress(pickle.dumps("0" * (1 << 20)))).decode()
    with pytest.raises(ValueError, match="more than 65536 bytes"):
        parsed({"private_test_cases": bomb})


def test_no_expectation_is_in_what_the_submission_gets() -> None:
    """The expected values are rare numbers: none occurs in the request, the input or the prefix of any test."""
    for truth in ({"inputs": ["1\n"], "outputs": ["918273"]}, {"inputs": [[1]], "outputs": [918273], "fn_name": "f"}):
        tests = parsed(truth)
        (test,) = tests.tests
        assert "918273" in str(test.expected)
        given = json.dumps(test.request()) if isinstance(test, CallTest) else test.stdin.decode()
        assert "918273" not in given + tests.prefix + tests.starter
    for truth in ({"assert_case": ["assert f(1) == 918273"]}, CHECK):
        tests = parsed(truth)
        assert "918273" in tests.tests[0].program and "918273" not in tests.prefix + tests.starter


def test_asserts_are_a_program_whose_unbound_names_are_the_submissions() -> None:
    names = {
        "assert f(1) == 2\nassert not g([1, 'a'], k=(2,))": {"f", "g"},
        "assert C().f(1) is None": {"C"},
        "assert abs(f(1) - 2) < 1e-6": {"f"},
        "assert math.isclose(f(1), 2)": {"f"},
        "for n in [2, 3]:\n    assert is_prime(n)": {"is_prime"},
        "def wanted(f): return f + 1\nassert f(2) == wanted(2)": {"f"},
        "assert is_same_list(f(list_node([1])), list_node([2]))": {"f"},
    }
    for program, expected in names.items():
        assert set(parsed({"assert_case": [program]}).tests[0].stand_ins) == expected, program
    assert parsed({"assert_case": ["assert math.isclose(f(1), 2)"]}).tests[0].program.startswith("import math\n")
    both = parsed({**STDIN, "assert_case": ["assert f() == 1"]}).tests
    assert tuple(map(type, both)) == (StdinTest, ProgramTest)


@pytest.mark.parametrize("name", [{}, {"fn_name": "f"}])
def test_tolerance_of_a_row_is_the_float_checkers(name: dict[str, str]) -> None:
    long = {**STDIN, **name, "checker": {"kind": "float", "tolerance": 1e-3}}
    assert parsed({**STDIN, **name, "tolerance": 1e-3}) == parsed(long) != parsed({**STDIN, **name})


def test_limits_of_a_row() -> None:
    assert parsed({**STDIN, "limits": {"time_s": 1.5}}).limits == ProblemLimits(1.5, None)
    assert parsed({**CHECK, "limits": {"memory_bytes": 1 << 30}}).limits == ProblemLimits(None, 1 << 30)
    assert parsed({"public_test_cases": [TEST], "limits": {"time_s": 2}}).limits == ProblemLimits(2, None)
    assert parsed(STDIN).limits == ProblemLimits()


def test_what_a_check_may_call() -> None:
    """The entry point, also by its own name, and what the prefix binds; a star import may bind any name."""
    code = "def check(candidate):\n    x = 3\n    assert candidate(g(x)) == 918273"
    own = {**CHECK, "test_code": code.replace("g(", "f("), "import_prefix": "def f(x): ..."}
    assert parsed(own).tests[0].stand_ins == {"candidate": "f", "f": "f"}
    reference = {**own, "import_prefix": "def f(x): return x + 1"}
    assert parsed(reference).tests[0].stand_ins == {"candidate": "f"}, "the row's own function is not the submission's"
    for prefix in ("def g(x): return x", "from nowhere import *"):
        (test,) = parsed({**CHECK, "test_code": code, "import_prefix": prefix}).tests
        assert test.stand_ins == {"candidate": "f"}
    inner = f"def f(x): return 918273\n{CHECK['test_code'].replace('918273', 'f(1)')}"
    assert parsed({**CHECK, "test_code": inner}).tests[0].stand_ins == {"candidate": "f"}


def test_only_missing_imports_are_added() -> None:
    def added(source: str, prefix: str = "") -> str:
        lines = with_imports(source, prefix).split("\n")
        (line,) = [line for line in lines if "__import__" in line]
        return line[line.index("__import__") :].partition("; ")[2]

    assert added("print(1)") == ""
    assert added("x: List[int] = []\nd = defaultdict(int)\nmath.pi") == (
        "from typing import List; from collections import defaultdict; import math"
    )
    assert added("from collections import *\nd = defaultdict(int)") == ""
    assert added("def gcd(a, b): return gcd(b, a)") == ""
    assert added("deque()", prefix="from collections import *") == ""
    future = with_imports('"""doc"""\nfrom __future__ import annotations\ninf\n').split("\n")
    assert future[1].startswith("from __future__ import annotations; __import__") and "import inf" in future[1]
    assert added("class S:\n    def gcd(self): return gcd(4, 6)") == "from math import gcd"
    assert added("def f(gcd): return gcd\ndef g(): return gcd(4, 6)") == "from math import gcd"
    assert added("def f():\n    global gcd\n    gcd = max\nf()\ngcd(4, 6)") == ""
    assert added("try: pass\nexcept E as inf: pass\nmatch 3:\n    case pi: print(inf, pi)") == ""
    for source, first in (
        ('("a"\n"\u00e4") # x\ninf', "a\u00e4"),
        ('from __future__ import print_function; x = """\n"""', ""),
    ):
        lines = ast.unparse(ast.parse(with_imports(source))).split("\n")
        assert "__import__" in lines[1] and first in lines[0], lines
