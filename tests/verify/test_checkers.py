"""Checkers, each with accepted and refused outputs; those that are programs run in real sandboxes.

Not proven here: testlib itself (its header is not part of this repository; the compiled checker keeps its protocol).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from or1_verify.code.checker_programs import CheckerFailed, CheckerPrograms
from or1_verify.code.checkers import parse_checker, text_matches, value_matches
from or1_verify.code.codec import build_list, build_tree, decode, encode, walk_list, walk_tree
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.sandbox import Sandbox

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

TEXTS: list[tuple[Any, str, Any, bool]] = [
    (None, "1 2\n3", " 1  2 \n3\n\n", True),
    (None, "1.0 2e1", "1 20", True),
    (None, "1 2 3", "1 2\n3", False),
    (None, "1\n\n2", "1\n2", False),
    (None, "0.3333333333333333", "0.3333333333", False),  # exact decimals: what a float checker is for
    (None, "50000000000000001", "50000000000000000", False),
    (None, "yes", "YES", False),
    (None, "", "0", False),
    (None, "nan", "nan", True),
    (None, "NaN", "nan", False),
    (None, "\u0661", "1", False),  # an Arabic digit, which int() and Decimal() would take
    (None, "1_0", "10", False),
    ("exact", "1 ", "1", False),
    ("exact", "1\n", "1\n", True),
    ("tokens", "1 2 3", "1 2\n3", True),
    ("tokens", "1 3 2", "1 2\n3", False),
    ("float", "0.3333333", "0.33333333333", True),
    ("float", "0.33333", "0.33333333333", False),
    ("float", "nan", "0.5", False),
    ("float", "inf", "0.5", False),
    ("float", "abc 1", "abc 1.0", True),
    ({"kind": "float", "relative": 0.01}, "1009", "1000", True),
    ({"kind": "float", "relative": 0.01}, "0.001", "0", False),
    ({"kind": "float", "absolute": 0.01}, "1000.1", "1000", False),
    ("unordered_lines", "b 2\na 1\n", "a 1\nb  2", True),
    ("unordered_lines", "2 b\na 1\n", "a 1\nb 2", False),
    ("unordered_lines", "a\na\nb", "a\nb\nb", False),
    ("unordered_tokens", "3 1\n2", "1 2 3", True),
    ("unordered_tokens", "1 2", "1 2 2", False),
    ("any_of", "2 1\n", ("1 2", "2 1"), True),
    ("any_of", "1 2 2 1", ("1 2", "2 1"), False),
    ({"kind": "any_of", "of": "float"}, "0.50000001", ("1", "0.5"), True),
]

VALUES: list[tuple[Any, Any, Any, bool]] = [
    (None, (1, 2), [1, 2], True),
    (None, [1, 2], [2, 1], False),
    (None, True, 1, False),
    (None, 3.0, 3, True),
    (None, 1e20 + 1, 10**20 + 1, False),
    (None, 0.1 + 0.2, 0.3, False),  # equal floats, as in LiveCodeBench
    (None, [0.5], [0.5], True),
    (None, float("nan"), 0.5, False),
    ({"kind": "float", "tolerance": 1e-9}, 0.1 + 0.2, 0.3, True),
    ({"kind": "float", "tolerance": 0}, 0.1 + 0.2, 0.3, False),
    ({"kind": "float", "tolerance": 1}, 4, 5, False),  # integers are not near each other
    ({"kind": "float", "tolerance": 1}, True, 1, False),
    (None, 3, [3], False),
    (None, {1: "a"}, {"1": "a"}, True),
    (None, {1, 2}, [1, 2], False),
    (None, build_list([1, 2]), [1, 2], True),
    (None, build_tree([1, None, 2]), [1, None, 2], True),
    (None, 10**5000, 10**5000, True),
    ("unordered", [[2, 1], [1, 2]], [[1, 2], [2, 1]], True),
    ("unordered", [[2, 1]], [[1, 2]], False),
    ("unordered", [1, 1, 2], [1, 2, 2], False),
    ("unordered", {1, 2}, [2, 1], True),
    ("nested_unordered", [[2, 1], [3]], [[3], [1, 2]], True),
    ("nested_unordered", [[2, 1], [3]], [[3, 1], [2]], False),
    ("float", [1.0000001], [1], True),
    ("float", [1.1], [1], False),
    ("any_of", 2, [1, 2], True),
    ("any_of", 3, [1, 2], False),
]


@pytest.mark.parametrize("row", range(len(TEXTS)))
def test_texts(row: int) -> None:
    checker, output, expected, accepted = TEXTS[row]
    assert text_matches(output.encode(), expected, parse_checker(checker, calls=False)) is accepted, TEXTS[row]


@pytest.mark.parametrize("row", range(len(VALUES)))
def test_values(row: int) -> None:
    checker, result, expected, accepted = VALUES[row]
    crossed = json.loads(json.dumps(encode(result)))
    assert value_matches(crossed, expected, parse_checker(checker, calls=True)) is accepted, VALUES[row]


@pytest.mark.parametrize(
    "garbage", [{"x": 1}, {"tuple": 3}, {"dict": [[1]]}, {"int": "zz"}, {}, {"a": 1, "b": 2}, None]
)
def test_what_cannot_be_read_is_not_equal(garbage: Any) -> None:
    assert not value_matches(garbage, [1], parse_checker(None, calls=True))


def test_values_cross_unchanged() -> None:
    values = [
        None,
        True,
        -7,
        2.5,
        "x",
        [1, (2, {3})],
        {(1,): [2]},
        frozenset({1}),
        b"\x00\xff",
        1 << 5000,
        -(1 << 5000),
    ]
    for value in values:
        back = decode(json.loads(json.dumps(encode(value))))
        assert back == value and type(back) is type(value)
    assert walk_list(decode(encode(build_list([1, 2, 3])))) == [1, 2, 3]
    assert walk_tree(decode(encode(build_tree([1, None, 2, 3])))) == [1, None, 2, 3]

    class Same(int):
        def __eq__(self, other: object) -> bool:
            return True

    assert type(encode(Same(3))) is int
    with pytest.raises(TypeError, match="is not data"):
        encode(object())
    ring = build_list([1])
    ring.next = ring
    with pytest.raises(ValueError, match="without an end"):
        encode(ring)


def test_what_can_be_iterated_over() -> None:
    """As lists where that is asked for, at any depth; an object of a class of one's own is not data."""

    class Own:
        def __iter__(self) -> Any:
            return iter([1])

    values = [iter([1, 2]), (n for n in (1, 2)), map(int, "12"), range(1, 3), {1: 0, 2: 0}.keys(), deque([1, 2])]
    assert encode([*values, (enumerate([5], 1),)], iterators=True) == [[1, 2]] * len(values) + [
        {"tuple": [[{"tuple": [1, 5]}]]}
    ]
    for value, iterators in ((iter([1]), False), (range(2), False), (Own(), True)):
        with pytest.raises(TypeError, match="is not data"):
            encode(value, iterators)
    with pytest.raises(ValueError, match="an iterator of more than 999999 items"):
        encode(itertools.count(), iterators=True)


PYTHON = """def check(input, output, answer):
    print('noise')
    return sorted(output.split()) == sorted(answer.split())
"""
CPP = """#include <stdio.h>
#include "limits_of_this_row.h"
int main(int argc, char** argv) {
    int n, a, b;
    fscanf(fopen(argv[1], "r"), "%d", &n);
    if (fscanf(fopen(argv[2], "r"), "%d %d", &a, &b) != 2) return 2;
    if (a < SMALLEST) return 3;
    return a + b == n ? 0 : 1;
}
"""


@pytest.fixture(scope="module")
def sandbox() -> Any:
    with Sandbox(SandboxLimits(cpu_s=5.0, wall_s=20.0)) as opened:
        yield opened


@needs_bubblewrap
def test_python_checkers(sandbox: Sandbox) -> None:
    programs = CheckerPrograms(sandbox)
    checker = parse_checker({"kind": "python", "source": PYTHON}, calls=False)
    programs.prepare(checker)
    assert programs.accepts(checker, "", b"2 1\n", "1 2")
    assert not programs.accepts(checker, "", b"2 2\n\xff", "1 2")
    mistyped = parse_checker({"kind": "python", "source": "def check(i, o, a): return o.x or a.strip()"}, calls=True)
    assert not programs.accepts(mistyped, [], 3, 1)  # 3 lacks an attribute: another type than expected
    for source in ("import math\ndef check(i, o, a): return math.nothing", "def check(i, o, a): return a.nothing"):
        with pytest.raises(CheckerFailed, match="AttributeError"):
            programs.accepts(parse_checker({"kind": "python", "source": source}, calls=True), [], 3, 1)
    unreadable = parse_checker({"kind": "python", "source": "def check(i, o, a): return int(o) == 1"}, calls=False)
    assert programs.accepts(unreadable, "", b"1", "")
    assert not programs.accepts(unreadable, "", b"x", "")
    broken = parse_checker({"kind": "python", "source": "def check(*a): return nothing"}, calls=False)
    with pytest.raises(CheckerFailed, match="NameError: name 'nothing'"):
        programs.accepts(broken, "", b"", "")
    for source, words in (("def check(", "does not parse"), ("x = 1", "define check")):
        with pytest.raises(ValueError, match=words):
            programs.prepare(parse_checker({"kind": "python", "source": source}, calls=False))


@needs_bubblewrap
def test_a_checker_that_meets_a_limit(sandbox: Sandbox) -> None:
    """The output is refused when the checker copes with the expected one; else the checker is at fault."""
    programs = CheckerPrograms(sandbox)
    limits, sandbox.limits = sandbox.limits, replace(sandbox.limits, cpu_s=1.0)
    try:
        spins = "def check(i, o, a):\n    while o != a: pass\n    return True"
        assert not programs.accepts(parse_checker({"kind": "python", "source": spins}, calls=False), "", b"1", "2")
        always = "def check(i, o, a):\n    while True: pass"
        with pytest.raises(CheckerFailed, match="CPU time limit"):
            programs.accepts(parse_checker({"kind": "python", "source": always}, calls=True), [], 1, 2)
    finally:
        sandbox.limits = limits


@needs_bubblewrap
@needs_compiler
def test_compiled_checkers(sandbox: Sandbox, tmp_path: Path) -> None:
    """The exit status is the verdict; compiled once, found by hash afterwards, also by another verifier."""
    files = {"limits_of_this_row.h": "#define SMALLEST 0\n"}
    checker = parse_checker({"kind": "testlib", "source": CPP, "files": files}, calls=False)
    CheckerPrograms(sandbox, cache=tmp_path).prepare(checker)
    (binary,) = (tmp_path / "checkers").iterdir()
    compiled_at = binary.stat().st_mtime_ns
    programs = CheckerPrograms(sandbox, cache=tmp_path)
    assert programs.accepts(checker, "10", b"4 6", "5 5")
    assert not programs.accepts(checker, "10", b"4 5", "5 5")
    assert not programs.accepts(checker, "10", b"x", "5 5")
    with pytest.raises(CheckerFailed, match="exit status 3"):
        programs.accepts(checker, "10", b"-1 11", "5 5")
    assert binary.stat().st_mtime_ns == compiled_at
    broken = parse_checker({"kind": "testlib", "source": "int main( {"}, calls=False)
    with pytest.raises(ValueError, match="does not compile"):
        programs.prepare(broken)
    with pytest.raises(ValueError, match=r"includes testlib\.h"):
        programs.prepare(parse_checker({"kind": "testlib", "source": '#include "testlib.h"'}, calls=False))
