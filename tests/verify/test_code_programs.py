"""Test programs against submissions in another process: what such programs may do, and what does not work on them.

Not proven here: that nothing else could be tried; the corpus has more (test_code_corpus.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from or1_verify.code.verifier import CodeVerifier
from or1_verify.config import VerifyConfig
from or1_verify.types import Message, Problem, Verdict

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

STACK = "class Stack:\n    def __init__(self): self.items, self.size = [], 0\n"
STACK += "    def push(self, x):\n        self.items.append(x); self.size += 1\n        return self\n"
STACK += "    def __len__(self): return len(self.items)\n    def __iter__(self): return iter(self.items)\n"

# program, right submission, wrong submission
PROGRAMS: dict[str, tuple[str, str, str]] = {
    "an exception that is expected": (
        "try:\n    f(-1)\n    raised = False\nexcept ValueError as error:\n    raised = 'negative' in str(error)\n"
        "assert raised",
        "def f(n):\n    if n < 0: raise ValueError('negative')",
        "def f(n):\n    if n < 0: raise KeyError('negative')",
    ),
    "keywords, loops, helpers of its own": (
        "def wanted(n): return n * n\nfor n in range(5):\n    assert f(n=n) == wanted(n), n",
        "def f(n): return n ** 2",
        "def f(n): return 2 * n",
    ),
    "a list changed in place": (
        "xs = [3, 1, 2]\nassert True\nsort(xs)\nassert xs == [1, 2, 3]",
        "def sort(xs): xs.sort()",
        "def sort(xs): return sorted(xs)",
    ),
    "objects": (
        "s = Stack().push(1).push(2)\nassert s.size == 2\nassert len(s) == 2\nassert list(s) == [1, 2]",
        STACK,
        STACK.replace("self.size += 1", "pass"),
    ),
    "attributes, fetched where they are not called": (
        "import enum\nclass Color(enum.Enum): RED = 1\ns = Stack().push(1)\nassert s.top is None and s.size > 0\n"
        "assert not hasattr(s, 'colour') and getattr(s, 'colour', 3) == 3\npush = s.push\npush(2)\n"
        "match Color.RED:\n    case Color.RED: assert f'{s.size}' == '2'",
        STACK.replace("self.size = [], 0", "self.size = [], 0; self.top = None"),
        STACK,
    ),
    "random inputs and a reference": (
        "import random\nrandom.seed(1)\nfor _ in range(20):\n    xs = [random.randrange(9) for _ in range(5)]\n"
        "    assert f(list(xs)) == sorted(xs)",
        "def f(xs): return sorted(xs)",
        "def f(xs): return list(set(xs))",
    ),
    "types stay apart": (
        "x = f()\nassert isinstance(x, tuple) and x == (1, {2}, b'3', None)",
        "def f(): return (1, {2}, b'3', None)",
        "def f(): return [1, {2}, b'3', None]",
    ),
    "nodes": (
        "head = list_node([1, 2, 3])\ndrop(head)\nassert is_same_list(head, list_node([1, 3]))",
        "def drop(head): head.next = head.next.next",
        "def drop(head): return head.next",
    ),
}

# program, dishonest submission
DISHONEST: dict[str, tuple[str, str]] = {
    "changes what it is compared with": (
        "x = 1\nxs = [3, 1, 2]\nassert f(xs) == sorted(xs)",
        "def f(xs):\n    xs.clear()\n    return []",
    ),
    "an object that says it is equal": (
        "x = 1\nassert f() == 3",
        "class E:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\ndef f(): return E()",
    ),
    "an exception that ends the loop": (
        "for found, wanted in zip(map(f, [1, 2]), [1, 4]):\n    assert found == wanted",
        "def f(n): raise StopIteration",
    ),
    "an exception that is called like one that ends the loop": (
        "assert all(map(f, [1, 2]))\nassert not any(map(f, [3]))",
        "class StopIteration(Exception): pass\ndef f(n): raise StopIteration",
    ),
    "attributes that are not there": (
        "x = f()\nassert x.left is not None or hasattr(x, 'right')",
        "class E: left = None\ndef f(): return E()",
    ),
    "an object that is always true": ("x = 1\nassert f().ok", "class E:\n    ok = None\ndef f(): return E()"),
    "a length that lies about itself": (
        "x = 1\nassert len(f()) == 3",
        "class L(int):\n    __eq__ = lambda s, o: True\n"
        "class E:\n    def __len__(self): return L(4)\ndef f(): return E()",
    ),
    "an exception that ends the program": ("x = 1\nassert f() == 3", "def f(): raise SystemExit(0)"),
    "a death": ("x = 1\nassert f() == 3", "import os\ndef f(): os._exit(0)"),
    "messages of its own": (
        "x = 1\nassert f() == 3",
        "import os\ndef f():\n    for n in range(1, 30):\n        try: os.write(n, b'{\"passed\": 2}\\n')\n"
        "        except OSError: pass",
    ),
    "an answer in advance": (
        "x = 1\nassert f(1) == 3\nassert f(2) == 4",
        "import os\ndef f(n):\n    if n == 1:\n        for k in range(3, 30):\n"
        '            try: os.write(k, b\'{"value": 3}\\n{"value": 4, "nonce": ""}\\n\')\n'
        "            except OSError: pass\n    return 3",
    ),
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    made = CodeVerifier(VerifyConfig(timeout_s=30.0))
    yield made
    made.close()


def judge(verifier: CodeVerifier, truth: dict[str, Any], source: str) -> Verdict:
    problem = Problem("id", "s", "code", (Message("user", "q"),), json.dumps(truth), {}, "x.jsonl:1")
    verifier.check_ground_truth(problem)
    return verifier.verify(problem, f"</think>\n```python\n{source}\n```", truncated=False)


@pytest.mark.parametrize("case", PROGRAMS)
def test_programs_tell_right_from_wrong(verifier: CodeVerifier, case: str) -> None:
    program, right, wrong = PROGRAMS[case]
    verdicts = [judge(verifier, {"assert_case": [program]}, source) for source in (right, wrong)]
    assert [verdict.status for verdict in verdicts] == ["right", "wrong"], verdicts


@pytest.mark.parametrize("case", DISHONEST)
def test_programs_are_not_deceived(verifier: CodeVerifier, case: str) -> None:
    program, source = DISHONEST[case]
    verdict = judge(verifier, {"assert_case": [program]}, source)
    assert verdict.status == "wrong", verdict


def test_checkers_of_calls(verifier: CodeVerifier) -> None:
    """A pair that sums to the target, whichever; and a checker that is broken makes no wrong answer."""
    source = "def check(given, result, expected):\n    return sum(result) == given[0] and len(result) == 2"
    truth = {"inputs": [[10]], "outputs": [None], "fn_name": "f", "checker": {"kind": "python", "source": source}}
    assert judge(verifier, truth, "def f(n): return (4, n - 4)").status == "right"
    assert judge(verifier, truth, "def f(n): return [n]").status == "wrong"
    assert judge(verifier, truth, "def f(n): return 'ab'").status == "wrong"
    broken = {**truth, "checker": {"kind": "python", "source": "def check(a, r, e): return nobody"}}
    verdict = judge(verifier, broken, "def f(n): return [1, 9]")
    assert verdict.status == "error" and "NameError" in verdict.detail
