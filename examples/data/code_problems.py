"""The example's programming problems: each with its tests and a reference solution."""

# ruff: noqa: E501  # statements and programs are lines of their own

from __future__ import annotations

import json
from typing import Any, NamedTuple


class StdinProblem(NamedTuple):
    """A program that reads and prints (TACO's layout)."""

    statement: str
    solution: str
    tests: tuple[tuple[str, str], ...]
    difficulty: str


class FunctionProblem(NamedTuple):
    """A function to complete (LeetCode's layout)."""

    statement: str
    name: str
    arguments: str
    body: str
    cases: tuple[tuple[str, str], ...]
    difficulty: str

    @property
    def starter(self) -> str:
        return f"class Solution:\n    def {self.name}(self, {self.arguments}):\n        "

    @property
    def completion(self) -> str:
        body = "\n".join(f"        {line}" for line in self.body.splitlines())
        return f"class Solution:\n    def {self.name}(self, {self.arguments}):\n{body}\n"

    @property
    def check(self) -> str:
        lines = [f"    assert candidate({given}) == {wanted}" for given, wanted in self.cases]
        return "def check(candidate):\n" + "\n".join(lines) + "\n"


STDIN = (
    StdinProblem(
        "The first line holds an integer n, the second n integers. Print how many of them are larger than every "
        "number before them; the first one counts.",
        "input()\nbest, count = None, 0\nfor x in map(int, input().split()):\n    if best is None or x > best:\n"
        "        best, count = x, count + 1\nprint(count)",
        (("5\n1 3 2 5 4\n", "3\n"), ("3\n9 9 1\n", "1\n")),
        "EASY",
    ),
    StdinProblem(
        "A line of text is given. Print its words in reverse order, separated by single blanks.",
        "print(' '.join(input().split()[::-1]))",
        (("the quick brown fox\n", "fox brown quick the\n"), ("  one   two \n", "two one\n")),
        "EASY",
    ),
    StdinProblem(
        "You are given the side lengths of a rectangular chocolate bar, m and n, on one line. A break splits one piece "
        "along a straight line between squares. Print the least number of breaks that leaves single squares only.",
        "m, n = map(int, input().split())\nprint(m * n - 1)",
        (("3 4\n", "11\n"), ("1 1\n", "0\n")),
        "EASY",
    ),
    StdinProblem(
        "Given a string of round and square brackets on one line, print YES if it is balanced and NO otherwise.",
        "s, stack = input().strip(), []\npairs = {')': '(', ']': '['}\nok = True\nfor c in s:\n    if c in '([':\n"
        "        stack.append(c)\n    elif not stack or stack.pop() != pairs[c]:\n        ok = False\n        break\n"
        "print('YES' if ok and not stack else 'NO')",
        (("([])[]\n", "YES\n"), ("([)]\n", "NO\n"), ("((\n", "NO\n")),
        "MEDIUM",
    ),
    StdinProblem(
        "There are n towns in a row and the cost of a bridge between neighbours is given, n - 1 integers on the second "
        "line after n on the first. Print the total cost of the cheapest set of bridges such that no two neighbouring "
        "bridges are both missing.",
        "n = int(input())\nc = list(map(int, input().split()))\ntake, skip = 0, 0\nfor x in c:\n"
        "    take, skip = min(take, skip) + x, take\nprint(min(take, skip))",
        (("4\n5 1 5\n", "1\n"), ("3\n7 2\n", "2\n")),
        "MEDIUM",
    ),
    StdinProblem(
        "Read an integer n and print the number of ways to climb n stairs when each step takes one, two or three "
        "stairs, modulo 1000007.",
        "n = int(input())\na, b, c = 1, 0, 0\nfor _ in range(n):\n    a, b, c = (a + b + c) % 1000007, a, b\nprint(a)",
        (("4\n", "7\n"), ("10\n", "274\n")),
        "MEDIUM",
    ),
    StdinProblem(
        "A grid of r lines with dots and hashes follows after r. Two hashes belong together when they share an edge. "
        "Print how many groups of hashes there are.",
        "r = int(input())\ng = [list(input().strip()) for _ in range(r)]\ncount = 0\nfor i in range(r):\n"
        "    for j in range(len(g[i])):\n        if g[i][j] == '#':\n            count += 1\n            todo = [(i, j)]\n"
        "            while todo:\n                a, b = todo.pop()\n"
        "                if 0 <= a < r and 0 <= b < len(g[a]) and g[a][b] == '#':\n                    g[a][b] = '.'\n"
        "                    todo += [(a + 1, b), (a - 1, b), (a, b + 1), (a, b - 1)]\nprint(count)",
        (("3\n#.#\n##.\n..#\n", "3\n"), ("1\n...\n", "0\n")),
        "HARD",
    ),
    StdinProblem(
        "Each of the following lines, until the end of the input, holds a name and a score. Print the names in order of "
        "falling score, names with equal scores in alphabetical order, one a line.",
        "import sys\nrows = [line.split() for line in sys.stdin if line.strip()]\n"
        "for name, _ in sorted(rows, key=lambda r: (-int(r[1]), r[0])):\n    print(name)",
        (("ann 3\nbob 7\ncid 3\n", "bob\nann\ncid\n"), ("zoe 1\n", "zoe\n")),
        "EASY",
    ),
    StdinProblem(
        "Print the smallest positive integer that is divisible by each integer from 1 to n, where n is the only input.",
        "import math\nr = 1\nfor k in range(2, int(input()) + 1):\n    r = r * k // math.gcd(r, k)\nprint(r)",
        (("10\n", "2520\n"), ("1\n", "1\n")),
        "EASY",
    ),
    StdinProblem(
        "Two strings stand on two lines. Print the length of the longest string that can be got from both by striking "
        "out letters.",
        "a, b = input(), input()\nrow = [0] * (len(b) + 1)\nfor x in a:\n    new = [0]\n    for j, y in enumerate(b):\n"
        "        new.append(row[j] + 1 if x == y else max(row[j + 1], new[j]))\n    row = new\nprint(row[-1])",
        (("nematode\nempty\n", "3\n"), ("abc\nxyz\n", "0\n")),
        "HARD",
    ),
)

FUNCTIONS = (
    FunctionProblem(
        "Given a list of integers, return a new list with the zeros moved to the end and the other numbers in their "
        "old order.",
        "shiftZeros", "nums", "kept = [n for n in nums if n]\nreturn kept + [0] * (len(nums) - len(kept))",
        (("[0, 1, 0, 3]", "[1, 3, 0, 0]"), ("[]", "[]")), "Easy",
    ),
    FunctionProblem(
        "Return the number of vowels in a text; upper and lower case count alike.",
        "countVowels", "text", "return sum(c in 'aeiou' for c in text.lower())",
        (("'Orange'", "3"), ("'rhythm'", "0")), "Easy",
    ),
    FunctionProblem(
        "A path on a file system is given as text. Return its shortest form: without '.', '..' and doubled slashes.",
        "tidyPath", "path",
        "parts = []\nfor part in path.split('/'):\n    if part == '..':\n        parts = parts[:-1]\n"
        "    elif part not in ('', '.'):\n        parts.append(part)\nreturn '/' + '/'.join(parts)",
        (("'/a/./b/../c/'", "'/a/c'"), ("'/..'", "'/'")), "Medium",
    ),
    FunctionProblem(
        "Return how many pairs of places i < j there are in the list such that the two numbers add up to the target.",
        "countPairs", "nums, target",
        "seen, count = {}, 0\nfor n in nums:\n    count += seen.get(target - n, 0)\n    seen[n] = seen.get(n, 0) + 1\n"
        "return count",
        (("[1, 3, 2, 2], 4", "2"), ("[5], 10", "0")), "Easy",
    ),
    FunctionProblem(
        "A matrix is given as a list of rows. Return its numbers in the order of a clockwise spiral from the upper left.",
        "spiral", "matrix",
        "out = []\nmatrix = [list(row) for row in matrix]\nwhile matrix:\n    out += matrix.pop(0)\n"
        "    matrix = [list(row) for row in zip(*matrix)][::-1]\nreturn out",
        (("[[1, 2], [3, 4]]", "[1, 2, 4, 3]"), ("[[7]]", "[7]")), "Medium",
    ),
    FunctionProblem(
        "Return the largest sum of a contiguous, non-empty part of the list.",
        "bestRun", "nums", "best = here = nums[0]\nfor n in nums[1:]:\n    here = max(n, here + n)\n    best = max(best, here)\nreturn best",
        (("[-2, 1, -3, 4, -1, 2]", "5"), ("[-3, -1]", "-1")), "Medium",
    ),
    FunctionProblem(
        "Encode a text by run lengths: each run of a letter becomes the letter and, if the run is longer than one, its "
        "length.",
        "encodeRuns", "text",
        "from itertools import groupby\nout = ''\nfor c, run in groupby(text):\n    n = len(list(run))\n"
        "    out += c + (str(n) if n > 1 else '')\nreturn out",
        (("'aaabcc'", "'a3bc2'"), ("''", "''")), "Easy",
    ),
    FunctionProblem(
        "Meetings are given as [start, end]. Return the smallest number of rooms in which all of them can take place; a "
        "meeting may begin when another ends.",
        "roomsNeeded", "meetings",
        "events = sorted([(s, 1) for s, _ in meetings] + [(e, -1) for _, e in meetings])\nmost = now = 0\n"
        "for _, change in events:\n    now += change\n    most = max(most, now)\nreturn most",
        (("[[0, 30], [5, 10], [10, 20]]", "2"), ("[]", "0")), "Medium",
    ),
)  # fmt: skip


def taco_row(problem: StdinProblem, **changes: Any) -> dict[str, Any]:
    tests = {"inputs": [given for given, _ in problem.tests], "outputs": [wanted for _, wanted in problem.tests]}
    return {
        "question": problem.statement,
        "solutions": json.dumps([problem.solution]),
        "starter_code": "",
        "input_output": json.dumps(tests),
        "difficulty": problem.difficulty,
        "picture_num": None,
        **changes,
    }


def leetcode_row(problem: FunctionProblem, **changes: Any) -> dict[str, Any]:
    return {
        "task_id": problem.name,
        "difficulty": problem.difficulty,
        "problem_description": problem.statement,
        "starter_code": problem.starter,
        "prompt": "from typing import *\n",
        "completion": problem.completion,
        "entry_point": f"Solution().{problem.name}",
        "test": problem.check,
        **changes,
    }
