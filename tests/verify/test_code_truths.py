"""Ground truths of code problems, without any sandbox: what is read from them, refused, and kept from the submission.

Not proven here: that what is accepted runs (test_code_corpus.py), or that real data sets hold nothing else.
"""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest
from code_corpus import compress

from or1_megatron.verify.code import livecodebench
from or1_megatron.verify.code.ground_truth import parse_code_tests
from or1_megatron.verify.code.imports import with_imports
from or1_megatron.verify.code.tests import CallTest, ProgramTest, StdinTest


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
    "no name": ({**STDIN, "fn_name": "f(x)"}, "expected the name of a function"),
    "assert is not python": ({"assert_case": ["assert f("]}, "assert_case[0]: not Python"),
    "two calls": ({"assert_case": ["assert f(1) == g(1)"]}, "judge its own result"),
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
    "checker's key": ({**STDIN, "checker": {"kind": "float", "eps": 1}}, "unknown key 'eps'"),
    "no source": ({**STDIN, "checker": "python"}, "expected its 'source'"),
    "one answer": ({**STDIN, "checker": "any_of"}, "outputs[0]: found '2', expected for any_of"),
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
    truths = [
        {"inputs": ["1\n"], "outputs": ["918273"]},
        {"inputs": [[1]], "outputs": [918273], "fn_name": "f"},
        {"assert_case": ["assert f(1) == 918273", "assert 918273 == f(1)"]},
        CHECK,
    ]
    for truth in truths:
        tests = parsed(truth)
        assert tests.tests
        for test in tests.tests:
            assert "918273" in str(test.expected)
            given = json.dumps(test.request) if isinstance(test, CallTest) else test.stdin.decode()
            assert "918273" not in given + tests.prefix + tests.starter


def test_plain_asserts_are_split_and_others_are_programs() -> None:
    kinds = {
        "assert f(1) == 2\nassert not g([1, 'a'], k=(2,))": (CallTest, CallTest),
        "assert C().f(1) is None": (CallTest,),
        "assert f(1) == 2\nx = 3\nassert f(x) == 4": (ProgramTest,),
        "assert abs(f(1) - 2) < 1e-6": (ProgramTest,),
        "assert decode(encode('x')) == 'x'": (ProgramTest,),
        "assert math.isclose(f(1), 2)": (ProgramTest,),
    }
    for program, expected in kinds.items():
        assert tuple(map(type, parsed({"assert_case": [program]}).tests)) == expected, program
    assert parsed({"assert_case": ["assert math.isclose(f(1), 2)"]}).tests[0].program.startswith("import math\n")
    both = parsed({**STDIN, "assert_case": ["assert f() == 1"]}).tests
    assert tuple(map(type, both)) == (StdinTest, CallTest)


def test_only_missing_imports_are_added() -> None:
    def added(source: str, prefix: str = "") -> str:
        lines = with_imports(source, prefix).split("\n")
        (line,) = [line for line in lines if line.startswith("__import__")]
        return line.partition("; ")[2]

    assert added("print(1)") == ""
    assert added("x: List[int] = []\nd = defaultdict(int)\nmath.pi") == (
        "from typing import List; from collections import defaultdict; import math"
    )
    assert added("from collections import *\nd = defaultdict(int)") == ""
    assert added("def gcd(a, b): return gcd(b, a)") == ""
    assert added("deque()", prefix="from collections import *") == ""
    future = with_imports('"""doc"""\nfrom __future__ import annotations\ninf\n').split("\n")
    assert future[1] == "from __future__ import annotations" and "import inf" in future[2]
