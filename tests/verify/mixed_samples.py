"""Mixed samples for the verifiers, 5% of them hostile, and the verdicts that each kind may get by construction.

Half of the samples are math, half code (programs, calls, asserts): right, wrong, truncated, without an answer.
"""

from __future__ import annotations

import json

from or1_verify.types import Message, Problem

STDIN = json.dumps({"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]})
CALL = json.dumps({"inputs": [[[3, 1, 2]], [[]]], "outputs": [[1, 2, 3], []], "fn_name": "ordered"})
ASSERT = json.dumps({"assert_case": ["for n in range(4):\n    assert twice(n) == n + n"]})
CODE = (
    (STDIN, "print(int(input()) * 2)", "print(42)"),
    (CALL, "def ordered(x): return sorted(x)", "def ordered(x): return x"),
    (ASSERT, "def twice(n): return 2 * n", "def twice(n): return n"),
)
MATH = (
    ('["12"]', "12", "13"),
    ('["\\\\frac{1}{2}"]', "0.5", "0.6"),
    ('["x+y"]', "y+x", "y-x"),
    ('["(1,2]"]', "1 < x \\le 2", "[1,2]"),
)
HOSTILE_CODE = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: break",
    "x = [bytearray(1 << 24) for _ in range(1 << 12)]",
    "while True: print('42' * 10000)",
    "import os\nos.kill(-1, 9)\nos._exit(0)",
    "import os\nos._exit(0)",
    "while True: pass",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint(42)",
    "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)",
    "import os\nfor fd in range(256):\n    try: os.write(fd, b'{\"value\": 1}\\n')\n    except OSError: pass\nexit()",
    "for n in range(10 ** 5): open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))",
)
HOSTILE_MATH = ("9^{9^{9^{9}}}", "\\boxed{" * 50, "{" * 3000, "((((((((((2^{9})!)!)!)!)!)!)!)!)!)!", "\\sqrt" * 900)
MAY_BE = {
    "right": {"right"},
    "wrong": {"wrong"},
    "none": {"no_answer"},
    "cut": {"truncated"},
    "hostile": {"wrong", "timeout", "no_answer"},
}


def sample(number: int) -> tuple[Problem, str, bool, str]:
    """Return (problem, response, truncated, kind) of the n-th sample."""
    kind = "hostile" if number % 20 == 7 else ("right", "wrong", "right", "none", "cut")[number // 2 % 5]
    if number % 2:
        truth, right, wrong = CODE[number // 10 % len(CODE)]
        hostile = HOSTILE_CODE[number // 20 % len(HOSTILE_CODE)]
        source = {"hostile": hostile, "wrong": wrong}.get(kind, right)
        text = f"</think>\n```python\n{source}\n```" if kind != "none" else "</think>no program"
    else:
        truth, right, wrong = MATH[number // 10 % len(MATH)]
        text = f"</think>\\boxed{{{wrong if kind == 'wrong' else right}}}" if kind != "none" else "no end"
    if kind == "hostile" and number // 20 % 4 == 3:  # a quarter of the hostile ones
        truth, text = MATH[number // 80 % len(MATH)][0], f"</think>\\boxed{{{HOSTILE_MATH[number // 80 % 5]}}}"
    ability = "math" if truth.startswith("[") else "code"
    problem = Problem(f"p{number // 8}", "soak", ability, (Message("user", "q"),), truth, {}, f"soak:{number}")
    return problem, text, kind == "cut", kind
