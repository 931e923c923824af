"""Hostile results of calls: what a submission can return where its value is compared, in tests of every kind.

Each is judged wrong, without an exception in the verifier, which judges on. Not shown: what a submission does to its
sandbox (test_attacks), and checkers that would run what they are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from or1_verify.code.checkers import parse_checker, text_matches, value_matches
from or1_verify.code.verifier import CodeVerifier, last_python_block
from or1_verify.config import VerifyConfig
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import SandboxTier, SandboxUnavailable
from or1_verify.sandbox.sandbox import Sandbox
from or1_verify.types import Message, Problem, Verdict

LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=1 << 30)
CALL = {"inputs": [[1]], "outputs": [[1, 2, 3]], "fn_name": "f"}
KINDS = {
    "call": CALL,
    "any order": {**CALL, "checker": "nested_unordered"},
    "checker": {**CALL, "checker": {"kind": "python", "source": "def check(i, o, a): return o == a"}},
    "assert": {"assert_case": ["assert f(1) == [1, 2, 3]"]},
    "program": {"assert_case": ["for i in range(3):\n    assert f(i) == [1, 2, 3]"]},
}
_SAYS = (
    "import json\njson.dumps = lambda o, **k: '{\"nonce\": \"%s\", ' % o['nonce'] + SAID + '}'\n"
    "def f(x): return 1\nSAID = "
)
DEEP = {
    "deep": "def f(x):\n    r = 'a'\n    for _ in range(900): r = [r]\n    return r",
    "deeper than can be read": _SAYS + "'\"value\": ' + '[' * 10 ** 6 + ']' * 10 ** 6",
}
FORGED = {
    "unknown tag": _SAYS + '\'"value": {"__class__": [], "x": 1}\'',
    "object of nobody's": _SAYS + '\'"value": {"object": {"a": 1}}, "changed": 3, "changed_keywords": [[1]]\'',
    "number of a million digits": _SAYS + "'\"value\": ' + '9' * 10 ** 6",
    "not a number": _SAYS + "'\"value\": [NaN, -Infinity, 1e999999]'",
    "equal list": "class L(list):\n    __eq__ = lambda s, o: True\n    __len__ = lambda s: 3\ndef f(x): return L([1])",
    "lying about its class": "class T:\n    __class__ = list\n    tolist = lambda s: s\ndef f(x): return T()",
    "pickled by call": "class T:\n    __reduce__ = lambda s: (eval, ('[1, 2, 3]',))\ndef f(x): return T()",
    "two processes answer": "import os\ndef f(x): return [1, 2] if os.fork() else [1]",
    "gone without an answer": "import os\ndef f(x): os._exit(0)",
    "gone before it is asked": "import os\nos._exit(0)",
    "exception that is the answer": "def f(x): raise type('[1, 2, 3]', (Exception,), {})([1, 2, 3])",
    "traced": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: sys.exit(0))\ndef f(x): return 1",
    "no builtins": "import builtins\nfor n in list(vars(builtins)): delattr(builtins, n)\ndef f(x): return 1",
}


@pytest.fixture(scope="module", params=("bubblewrap", "landlock"))
def verifier(request: pytest.FixtureRequest) -> Iterator[CodeVerifier]:
    tier: SandboxTier = request.param
    try:
        made = CodeVerifier(VerifyConfig(), Sandbox(LIMITS, tier))
    except SandboxUnavailable as error:
        pytest.skip(f"no {tier} here: {error}")
    yield made
    made.close()


def judged(verifier: CodeVerifier, truth: object, source: str) -> Verdict:
    problem = Problem("i", "s", "code", (Message("user", "q"),), json.dumps(truth), {}, "x.jsonl:1")
    return verifier.verify(problem, f"</think>\n```python\n{source}\n```", truncated=False)


def test_no_hostile_result_is_taken_or_ends_the_verifier(verifier: CodeVerifier) -> None:
    cases = {(kind, name): source for kind in KINDS for name, source in DEEP.items()}
    cases |= {("call", name): source for name, source in FORGED.items()}
    cases |= {("program", name): FORGED[name] for name in ("object of nobody's", "equal list", "lying about its class")}
    results = {case: judged(verifier, KINDS[case[0]], source).status for case, source in cases.items()}
    assert {case: status for case, status in results.items() if status != "wrong"} == {}
    for truth in KINDS.values():
        assert judged(verifier, truth, "def f(x): return [1, 2, 3]").status == "right"


def test_a_call_that_ends_its_process_is_not_waited_for(verifier: CodeVerifier) -> None:
    verdict = judged(verifier, CALL, "import os\ndef f(x): os._exit(0)")
    assert verdict.status == "wrong" and "exit status 0" in verdict.detail and "limit" not in verdict.detail


def test_what_a_submission_says_is_spelled_out_in_the_verdict(verifier: CodeVerifier) -> None:
    """An escape sequence would reach the terminal of ``--explain``, a lone surrogate no file can hold."""
    detail = judged(verifier, CALL, "def f(x): raise ValueError('\\ud800\\x1b[2J')").detail
    assert "ValueError: \\ud800\\x1b[2J" in detail and detail.isprintable()


def test_nothing_is_exponential_or_quadratic_in_what_a_submission_chooses() -> None:
    """Each would take minutes to ages if it were; the suite's own time limit is the bound."""
    nested: object = "a"
    for _ in range(100):
        nested = [nested]
    assert not value_matches(nested, [["a"]], parse_checker("nested_unordered", calls=True))
    assert value_matches([[nested, 1], [2]], [[2], [1, nested]], parse_checker("nested_unordered", calls=True))
    lines = b"a\n" * (1 << 20)
    assert not any(text_matches(lines, "a", parse_checker(kind, calls=False)) for kind in ("lines", "unordered_lines"))
    for line in ("```" + " " * (1 << 18) + "`", "```" + "a" * (1 << 18) + "`", "`" * (1 << 18) + "a`"):
        assert last_python_block(f"{line}\n```python\n1\n```\n") == "1\n"
    assert last_python_block("```python\n" * (1 << 16)) is None
