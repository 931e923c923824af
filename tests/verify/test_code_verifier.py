"""The code verifier with real sandboxes. Hand-written programs of each kind, right, wrong and hostile.

The hostile ones are the classic attacks on graders, not a proof that there are no others; test_attacks has those on
resources and on the sandbox.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import psutil
import pytest

from or1_verify.code.verifier import CodeVerifier, last_python_block
from or1_verify.config import VerifyConfig
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.sandbox import Sandbox
from or1_verify.types import Message, Problem

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

DOUBLE = {"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8"]}
ADD = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = {"assert_case": ["assert add(1, 2) == 3", "assert 7 == add(3, 4)", "assert not add(0, 0)"]}
LEETCODE = {
    "entry_point": "Solution().add",
    "import_prefix": "from typing import *\n",
    "test_code": (
        "def check(candidate):\n    assert candidate(a = 1, b = 2) == 3\n    assert candidate(a = 3, b = 4) == 7\n"
    ),
}
LISTS = {
    "entry_point": "Solution().rev",
    "import_prefix": (
        "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n"
        "def list_node(values):\n    head = None\n    for v in reversed(values):\n        head = ListNode(v, head)\n"
        "    return head\n"
    ),
    "test_code": (
        "def check(candidate):\n    assert is_same_list(candidate(head = list_node([1, 2, 3])), list_node([3, 2, 1]))\n"
        "    assert is_same_list(candidate(head = list_node([])), list_node([]))\n"
    ),
}


def problem(truth: Any) -> Problem:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    return Problem("id", "s", "code", (Message("user", "q"),), text, {}, "x.jsonl:1")


def answer(source: str) -> str:
    return f"Thinking.</think>Here it is:\n```python\n{source}\n```\nDone."


@pytest.fixture(scope="module")
def verifier() -> CodeVerifier:
    limits = SandboxLimits(cpu_s=30.0, wall_s=60.0, memory_bytes=1 << 30, output_bytes=1 << 20)
    return CodeVerifier(VerifyConfig(), Sandbox(limits))


RIGHT = {
    "stdin": (DOUBLE, "print(int(input()) * 2)"),
    "stdin main guard": (DOUBLE, "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()"),
    "call": (ADD, "def add(a, b):\n    print('noise')\n    return a + b"),
    "call in class": (ADD, "class Solution:\n    def add(self, a, b):\n        return a + b"),
    "asserts": (ASSERTS, "def add(a, b):\n    return a + b"),
    "leetcode": (LEETCODE, "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b"),
    "linked lists": (
        LISTS,
        "class Solution:\n    def rev(self, head):\n        back = None\n        while head:\n"
        "            head.next, back, head = back, head, head.next\n        return back",
    ),
    "tuples": ({"assert_case": ["assert f() == (1, [2], {3: 'x'}, {4})"]}, "def f(): return (1, [2], {3: 'x'}, {4})"),
    "near floats": (
        {"inputs": [[0.1, 0.2]], "outputs": [0.3], "fn_name": "add", "checker": {"kind": "float", "tolerance": 1e-9}},
        "def add(a, b): return a + b",
    ),
    "wrapped output": ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, "def add(a, b): return a + b"),
    "json lines": ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, "def add(a, b): return a + b"),
}

WRONG = {
    "wrong output": (DOUBLE, "print(42)"),
    "wrong later": (ADD, "def add(a, b): return 3"),
    "raises": (DOUBLE, "raise SystemError"),
    "right, then fails": (DOUBLE, "print(int(input()) * 2)\nraise SystemExit(1)"),
    "list is not tuple": ({"assert_case": ["assert f() == (1, 2)"]}, "def f(): return [1, 2]"),
    "not wrapped": ({"inputs": ["1\n2"], "outputs": ["[3]"], "fn_name": "add"}, "def add(a, b): return a + b"),
    "no such function": (ADD, "def plus(a, b): return a + b"),
    "syntax": (DOUBLE, "print("),
    "null byte": (DOUBLE, "print(1)\0"),
    "endless": ({**DOUBLE, "limits": {"time_s": 1}}, "while True: pass"),
    "deep nesting": (DOUBLE, "(" * 5000),
}

HOSTILE = {
    "exit 0 at import": (LEETCODE, "import os\nos._exit(0)"),
    "frames": (
        ADD,
        "import sys\ndef add(a, b):\n    frame = sys._getframe(1)\n    while frame:\n"
        "        for v in frame.f_locals.values():\n"
        "            if isinstance(v, dict) and 'outputs' in v: return v['outputs'][0]\n        frame = frame.f_back\n"
        "    return open('/box/request.json').read()",
    ),
    "one hash for all": (
        {"assert_case": ["assert f(1) == {1, 2}"], "limits": {"time_s": 1}},
        "class H(int):\n    def __hash__(self): return id(self)\n"
        "def f(x): return {H(k * (2**61 - 1)) for k in range(30000)}",
    ),
    "huge integer": (ADD, "def add(a, b): return 10 ** 100000"),
}


@needs_bubblewrap
@pytest.mark.parametrize("case", RIGHT)
def test_right_programs_pass(verifier: CodeVerifier, case: str) -> None:
    truth, source = RIGHT[case]
    verifier.check_ground_truth(problem(truth))
    verdict = verifier.verify(problem(truth), answer(source), truncated=False)
    assert (verdict.reward, verdict.status) == (1.0, "right"), verdict.detail


@needs_bubblewrap
@pytest.mark.parametrize("case", [*WRONG, *HOSTILE])
def test_wrong_and_hostile_programs_fail(verifier: CodeVerifier, case: str) -> None:
    """And each leaves no process behind, and the next right program still passes."""
    truth, source = {**WRONG, **HOSTILE}[case]
    verdict = verifier.verify(problem(truth), answer(source), truncated=False)
    assert (verdict.reward, verdict.status) == (0.0, "wrong"), verdict.detail
    assert verdict.detail
    assert [child.name() for child in psutil.Process().children(recursive=True) if child.name() == "bwrap"] == []
    after = verifier.verify(problem(DOUBLE), answer("print(int(input()) * 2)"), truncated=False)
    assert after.status == "right", after.detail


@needs_bubblewrap
def test_no_block_no_close_and_truncation(verifier: CodeVerifier) -> None:
    right = "print(int(input()) * 2)"
    cases = {
        "no block": (f"</think>{right}", False, "no_answer"),
        "inside the reasoning": (f"```python\n{right}\n```\n</think>", False, "no_answer"),
        "never closed reasoning": (f"<think>```python\n{right}\n```", False, "no_answer"),
        "truncated": (answer(right), True, "truncated"),
        "last block wins": (f"</think>\n```python\n{right}\n```\n```python\nprint(0)\n```", False, "wrong"),
    }
    for name, (response, truncated, status) in cases.items():
        assert verifier.verify(problem(DOUBLE), response, truncated).status == status, name


def test_last_python_block() -> None:
    assert last_python_block("```python\na\n```\ntext\n```\nb\n```") == "a\n"
    assert last_python_block("```\na\n```\n```cpp\nb\n```") == "a\n"
    assert last_python_block("```python\na\n```\n```py\nb\n```\n") == "b\n"
    assert last_python_block("```python\na\n```\n```python\nb") is None
    assert last_python_block("no code, but `x`") is None


FENCES = {
    "four backticks": "````python\na\n```\nb\n````\n",
    "tildes, label in capitals": "~~~PY3\na\n~~~\n",
    "in a list": "1. ```python\n   if a:\n       b\n   ```",
    "in a quote": "> ```python\n> if a:\n>     b\n> ```\n",
    "text before it, text behind its end": "**Solution:**```ipython\na\n``` Done. ```x```\n",
    "in a box": "\\boxed{```python\na\n```}",
    "its end behind the last line": "```python\na```\n\nThat is all.",
    "a fence inside a string": '```python\na = """\n```\n"""\nb\n```\n',
    "a fence inside a comment": "```python\na  # ```\nb\n```\n",
    "the text speaks of fences": "Between ```python and ``` comes\n```python\na\n```\n",
    "a whole answer in a block": "````markdown\nIt is\n```python\na\n```\n````\n",
    "it does not parse": "```python\na b\n```\n```\nc\n```",
}
"""A response by the form of its fence."""
TAKEN = ("a\n```\nb\n", "a\n", "if a:\n    b\n", "if a:\n    b\n", "a\n", "a\n", "a", 'a = """\n```\n"""\nb\n')


@pytest.mark.parametrize(("name", "source"), zip(FENCES, (*TAKEN, "a  # ```\nb\n", "a\n", "a\n", "a b\n"), strict=True))
def test_fences_as_models_write_them(name: str, source: str) -> None:
    """Four backticks hold three, though what they hold does not parse."""
    assert last_python_block(FENCES[name]) == source


@needs_bubblewrap
@pytest.mark.parametrize(
    ("truth", "source"),
    [
        (DOUBLE, "print(2 * int(open('/dev/stdin').read()), file=open('/dev/stdout', 'w'))"),
        (DOUBLE, "import pathlib, sys\nsys.stdin = pathlib.Path('/dev/stdin').open()\nprint(2 * int(input()))"),
        ({"inputs": ["9" * 6000], "outputs": ["1" + "0" * 6000]}, "print(int(input()) + 1)"),
        ('{"fn_name": "f", "inputs": [[6000]], "outputs": [1%s]}' % ("0" * 6000), "def f(n): return 10 ** n"),
        ('{"assert_case": ["assert f(1%s) == 6001"]}' % ("0" * 6000), "def f(n): return len(str(n))"),
        (ADD, "import numpy as np\ndef add(a, b): return np.add(a, b)"),
        ({**LEETCODE, "import_prefix": "import numpy as np\nimport pytest\n"}, "def add(a, b): return np.add(a, b)"),
    ],
    ids=["stdin by name", "as a path", "digits read", "in a result", "in an assert", "numpy", "numpy in the prefix"],
)
def test_what_programs_use(verifier: CodeVerifier, truth: Any, source: str) -> None:
    verifier.check_ground_truth(problem(truth))
    verdict = verifier.verify(problem(truth), answer(source), truncated=False)
    assert verdict.status == "right", verdict.detail


@needs_bubblewrap
def test_tests_that_import_what_is_not_there_are_refused(verifier: CodeVerifier) -> None:
    """Unless they try: then they can do without."""
    tried = "try:\n    import no_such_module\nexcept ImportError:\n    pass\n"
    verifier.check_ground_truth(problem({**LEETCODE, "import_prefix": tried}))
    for key in ("import_prefix", "test_code"):
        with pytest.raises(
            ValueError, match="its tests import no_such_module, which the sandbox's Python does not have"
        ):
            verifier.check_ground_truth(problem({**LEETCODE, key: "import no_such_module.x as y\n" + LEETCODE[key]}))


@needs_bubblewrap
def test_all_tests_are_run_when_asked_for() -> None:
    source = "n = int(input())\nprint(42 if n == 21 else 9)"
    truth = {"inputs": ["1\n", "21\n", "2\n"], "outputs": ["2", "42", "4"]}
    stopping, thorough = CodeVerifier(VerifyConfig()), CodeVerifier(VerifyConfig(early_stop=False))
    assert (
        "0 of 3 tests passed [F--]; test 0: wrong output"
        in stopping.verify(problem(truth), answer(source), False).detail
    )
    assert (
        "1 of 3 tests passed [F.F]; test 0: wrong output"
        in thorough.verify(problem(truth), answer(source), False).detail
    )


@needs_bubblewrap
def test_calls_leave_nothing_to_the_next() -> None:
    """A counter in a module, a file in /tmp: each call finds the submission as it was loaded."""
    source = "import os\nn = [0]\ndef f(x):\n    n[0] += 1\n    return [x, n[0], os.path.exists('/tmp/left')]\n"
    truth = {"inputs": [[1], [2], [3]], "outputs": [[k, 1, False] for k in (1, 2, 3)], "fn_name": "f"}
    assert CodeVerifier(VerifyConfig()).verify(problem(truth), answer(source), False).status == "right"


@needs_bubblewrap
def test_a_budget_bounds_all_tests_together() -> None:
    truth = {"inputs": ["", "", ""], "outputs": ["1"] * 3}
    verdict = CodeVerifier(VerifyConfig(budget_s=0.05)).verify(
        problem(truth), answer("import time\ntime.sleep(0.1)\nprint(1)"), False
    )
    assert verdict.status == "wrong" and "all tests together took more than" in verdict.detail
