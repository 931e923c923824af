"""Hand-written problems of every kind of ground truth, with right, wrong and dishonest submissions to them.

``HONEST`` (code_honest.txt): (problem, whether the submission is right, style, source). Whether it is right was decided
by reading it, not by running it. A style that begins with a word of ``NEEDS`` fails in some sandboxes.
``HACKS`` (code_hacks.txt): (problem, how the submission cheats, source). No submission solves its problem, so each
accepted submission is a hole in the verifier.
"""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NEEDS = ("processes", "files")
"""What the sandbox's second tier refuses (docs/sandbox.md): that a program starts processes or writes scratch files."""

SUM = {"inputs": ["2\n1 2\n", "3\n4 5 6\n", "1\n-7\n"], "outputs": ["3\n", "15\n", "-7\n"]}
GRID = {"inputs": ["2 3\n", "1 1\n"], "outputs": ["1 2 3\n4 5 6\n", "1\n"]}
FRACTION = {"inputs": ["1 3\n", "1 4\n", "22 7\n"], "outputs": ["0.3333333333\n", "0.25\n", "3.1428571429\n"]}
FRACTION_TOLERANT = {**FRACTION, "checker": {"kind": "float", "tolerance": 1e-6}}
YESNO = {"inputs": ["4\n", "7\n", "0\n"], "outputs": ["YES\n", "NO\n", "YES\n"]}
DIVISORS = {"inputs": ["6\n", "7\n"], "outputs": ["1\n2\n3\n6\n", "1\n7\n"], "checker": "unordered_lines"}
PAIR = {"inputs": ["5\n", "9\n"], "outputs": [["1 4", "4 1", "2 3", "3 2"], ["4 5", "5 4"]], "checker": "any_of"}
SPLIT = {
    "inputs": ["10\n", "7\n"],
    "outputs": ["5 5\n", "3 4\n"],
    "checker": {
        "kind": "python",
        "source": "def check(input, output, answer):\n    a, b = map(int, output.split())\n"
        "    return a + b == int(input) and min(a, b) >= 1\n",
    },
}
DEEP = {"inputs": ["5000\n", "10\n"], "outputs": ["5000\n", "10\n"]}
WORDS = {"inputs": ["b a c a\n"], "outputs": ["a a b c\n"]}
ADD = {"inputs": ["1\n2", "-5\n5", "100000000000000000000\n1"], "outputs": ["3", "0", "100000000000000000001"]}
ADD = {**ADD, "fn_name": "add"}
TWO_SUM = {"inputs": ["[2, 7, 11, 15]\n9", "[3, 3]\n6"], "outputs": ["[0, 1]", "[0, 1]"], "fn_name": "twoSum"}
PERMUTE = {
    "inputs": ["[1, 2]", "[0]"],
    "outputs": ["[[1, 2], [2, 1]]", "[[0]]"],
    "fn_name": "permute",
    "checker": "unordered",
}
MEAN = {"inputs": ["[1, 2]", "[0.1, 0.2]"], "outputs": ["1.5", "0.15"], "fn_name": "mean"}
MEAN["checker"] = {"kind": "float", "tolerance": 1e-9}
HALVES = {"inputs": ["3", "0.3"], "outputs": ["1.5", "0.15"], "fn_name": "half"}
REVERSE = {"inputs": ["[1, 2, 3]", "[]"], "outputs": ["[3, 2, 1]", "[]"], "fn_name": "reverseList"}
DEPTH = {"inputs": ["[3, 9, 20, null, null, 15, 7]", "[]"], "outputs": ["3", "0"], "fn_name": "maxDepth"}
ASSERTS = {"assert_case": ["assert fib(0) == 0", "assert fib(10) == 55", "assert fib(1) == 1"]}
NEAR = {"assert_case": ["assert abs(root(2) - 1.4142135623) < 1e-6", "assert root(9) == 3.0"]}
LRU = {
    "assert_case": [
        "cache = LRUCache(2)\ncache.put(1, 1)\ncache.put(2, 2)\nassert cache.get(1) == 1\n"
        "cache.put(3, 3)\nassert cache.get(2) == -1\nassert cache.get(3) == 3"
    ]
}
PREFIX = "from typing import *\nfrom collections import *\nfrom math import *\ninf = float('inf')\n"
LEETCODE = {
    "entry_point": "Solution().maxProfit",
    "import_prefix": PREFIX,
    "test_code": "def check(candidate):\n    assert candidate(prices = [7,1,5,3,6,4]) == 5\n"
    "    assert candidate(prices = [7,6,4,3,1]) == 0\n    assert candidate(prices = [2,4,1]) == 2\n",
}
IN_PLACE = {
    "entry_point": "Solution().removeDuplicates",
    "import_prefix": PREFIX,
    "test_code": "def check(candidate):\n    for given, wanted in [([1,1,2],[1,2]), ([0,0,1,1,2],[0,1,2])]:\n"
    "        nums = list(given)\n        k = candidate(nums)\n        assert nums[:k] == wanted\n",
}
MERGE = {
    "entry_point": "Solution().mergeTwoLists",
    "import_prefix": PREFIX,
    "test_code": "def check(candidate):\n"
    "    assert is_same_list(candidate(list1 = list_node([1,2,4]), list2 = list_node([1,3])), list_node([1,1,2,3,4]))\n"
    "    assert is_same_list(candidate(list1 = list_node([]), list2 = list_node([])), list_node([]))\n",
}
INVERT = {
    "entry_point": "Solution().invertTree",
    "import_prefix": PREFIX,
    "test_code": "def check(candidate):\n"
    "    assert is_same_tree(candidate(root = tree_node([4,2,7,1,3])), tree_node([4,7,2,None,None,3,1]))\n"
    "    assert candidate(root = tree_node([])) is None\n",
}
ODD = {"inputs": ["3", "8"], "outputs": ["true", "false"], "fn_name": "odd"}
COUNT = {"inputs": ['"aab"', '""'], "outputs": ['{"a": 2, "b": 1}', "{}"], "fn_name": "count"}
SHOUT = {"inputs": ['"h\u00e9y"', '"x"'], "outputs": ['"H\u00c9Y"', '"X"'], "fn_name": "shout"}
ZIPPED = {"assert_case": "for found, wanted in zip(map(f, [1, 2, 3]), [1, 4, 9]):\n    assert found == wanted"}
PRIMES = {"assert_case": "assert all(map(is_prime, [2, 3, 5]))\nassert not any(map(is_prime, [4, 6]))"}
SAFE = {
    "assert_case": "try:\n    root(-1)\n    refused = False\nexcept ValueError as error:\n"
    "    refused = 'negative' in str(error)\nassert refused\nassert root(9) == 3"
}
POINT = {
    "assert_case": "p = Point(1, 2)\nq = p.add(Point(3, 4))\nassert q.x == 4 and q.y == 6\nassert (p.x, p.y) == (1, 2)"
}
CHECKED = {
    "inputs": [[7], [1]],
    "outputs": [None, None],
    "fn_name": "multiple",
    "checker": {
        "kind": "python",
        "source": "def check(given, result, expected):\n    return result.bit_length() <= 40 and "
        "sum(k * given[0] == result for k in range(1, result + 1)) == 1\n",
    },
}
ACCOUNT = {
    "assert_case": "a = Account(5)\nassert a.owner is None and not hasattr(a, 'password')\na.open('x')\n"
    "assert a.owner is not None and hasattr(a, 'balance')\nassert 4 < a.balance + 1 < 7\n"
    "assert isinstance(a.balance, int)\ndraw = a.draw\nassert f'{draw(2)} {a.balance}' == '2 3'\n"
    "assert getattr(a, 'limit', 0) == 0"
}
OWNED = {"assert_case": "a = Account()\nassert a.owner is not None\nassert hasattr(a, 'balance')"}
UNICODE = {"inputs": ["cafe\u0301\n", "A\u030angstro\u0308m\n"], "outputs": ["caf\u00e9\n", "\u00c5ngstr\u00f6m\n"]}
FLOOD = {"inputs": ["300000\n"], "outputs": ["".join(f"{n}\n" for n in range(300000))]}
ZERO_OF = {  # as HumanEval/32: the test judges by a function of the statement
    "entry_point": "find_zero",
    "import_prefix": "import math\n\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n",
    "test_code": "def check(candidate):\n    for coeffs in ([-10, -2], [1, 2], [-4, 2]):\n"
    "        solution = candidate(list(coeffs))\n        assert math.fabs(poly(coeffs, solution)) < 1e-4\n",
}
THIRDS = {  # as HumanEval/33: the test calls the function by its own name, too
    "entry_point": "sort_third",
    "import_prefix": "",
    "test_code": "def check(candidate):\n    assert tuple(candidate([1, 2, 3])) == tuple(sort_third([1, 2, 3]))\n"
    "    assert tuple(candidate([5, 6, 3, 4, 8, 9, 2])) == (2, 6, 3, 4, 8, 9, 5)\n",
}
SHIFT = {  # as HumanEval/50
    "entry_point": "decode_shift",
    "import_prefix": "def encode_shift(s):\n"
    "    return ''.join(chr((ord(ch) + 5 - ord('a')) % 26 + ord('a')) for ch in s)\n",
    "test_code": "def check(candidate):\n    assert encode_shift('az') == 'fe'\n    for text in ('', 'abc', 'xyz'):\n"
    "        encoded = encode_shift(text)\n        assert candidate(encoded) == text\n",
}
QUICK = {**SUM, "limits": {"time_s": 3, "memory_bytes": 200 << 20}}
COUNTDOWN = {"inputs": ["3\n"], "outputs": ["3\n2\n1\n"], "checker": "exact"}


def compress(tests: list[dict[str, str]]) -> str:
    """Return private tests as LiveCodeBench writes them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def _lcb(functional: bool) -> dict[str, Any]:
    kind = "functional" if functional else "stdin"
    tests = [(n, str(n * n)) for n in (3, 12, 0, 1000)]
    rows = [{"input": str(n) if functional else f"{n}\n", "output": out, "testtype": kind} for n, out in tests]
    return {
        "public_test_cases": json.dumps(rows[:1]),
        "private_test_cases": compress(rows[1:]),
        "metadata": json.dumps({"func_name": "square"} if functional else {}),
        "starter_code": "class Solution:\n    def square(self, n: int) -> int:\n        " if functional else "",
    }


PROBLEMS: dict[str, dict[str, Any]] = {
    "sum": SUM, "grid": GRID, "fraction": FRACTION, "fraction_tolerant": FRACTION_TOLERANT, "yesno": YESNO,
    "divisors": DIVISORS, "pair": PAIR, "split": SPLIT, "deep": DEEP, "words": WORDS, "add": ADD, "two_sum": TWO_SUM,
    "permute": PERMUTE, "mean": MEAN, "reverse": REVERSE, "depth": DEPTH, "asserts": ASSERTS, "near": NEAR, "lru": LRU,
    "leetcode": LEETCODE, "in_place": IN_PLACE, "merge": MERGE, "invert": INVERT,
    "odd": ODD, "count": COUNT, "shout": SHOUT, "zipped": ZIPPED, "primes": PRIMES, "safe": SAFE, "point": POINT,
    "checked": CHECKED, "unicode": UNICODE, "countdown": COUNTDOWN, "flood": FLOOD,
    "halves": HALVES, "zero_of": ZERO_OF, "thirds": THIRDS, "shift": SHIFT, "quick": QUICK,
    "account": ACCOUNT, "owned": OWNED,
    "lcb_stdin": _lcb(functional=False), "lcb_call": _lcb(functional=True),
}  # fmt: skip


def _submissions(name: str) -> list[tuple[str, str, str]]:
    """Return (problem, remark, source) of each block of a file: a line ``=== problem: remark``, then the source."""
    blocks = (FOLDER / name).read_text().split("=== ")[1:]
    heads = [block.partition("\n") for block in blocks]
    return [(*head.split(": ", 1), source) for head, _, source in heads]  # type: ignore[misc]


HONEST = [
    (problem, remark.startswith("right"), remark.partition(", ")[2], source)
    for problem, remark, source in _submissions("code_honest.txt")
]
HACKS = _submissions("code_hacks.txt")
