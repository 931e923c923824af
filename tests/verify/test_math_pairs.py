"""The labelled pairs stay what they were frozen as: read whole, split by hash alone, both sides of every class.

Not proven here: that a label is what every grader would say (the policy is in docs/math_verifier.md).
"""

from __future__ import annotations

import hashlib

import math_pairs
import pytest

# The frozen third as it was committed before any rule was written. It is never edited, only added to elsewhere.
FROZEN_SHA256 = "88f191ed0cd6c2e245480c0cc86aac998560ee910d31f204dc3f16e92198fe36"


def test_the_frozen_file_is_the_one_that_was_frozen() -> None:
    assert hashlib.sha256((math_pairs.FOLDER / "frozen.txt").read_bytes()).hexdigest() == FROZEN_SHA256


def test_the_hash_alone_says_which_golds_are_frozen() -> None:
    parts = {part: math_pairs.load(part) for part in ("tuning", "frozen")}
    kinds = {pair.kind for pairs in parts.values() for pair in pairs}
    for kind in kinds:
        golds = {part: {pair.golds for pair in pairs if pair.kind == kind} for part, pairs in parts.items()}
        everything = sorted(golds["tuning"] | golds["frozen"])
        assert golds["frozen"] == math_pairs.frozen_golds(everything, kind), kind
        assert not golds["tuning"] & golds["frozen"], kind


def test_it_is_large_two_sided_and_without_repeats() -> None:
    pairs = math_pairs.load("tuning") + math_pairs.load("frozen")
    assert len(pairs) == len(set(pairs)) >= 600
    assert 0.4 <= sum(pair.right for pair in pairs) / len(pairs) <= 0.6
    for kind in {pair.kind for pair in pairs}:
        assert {pair.right for pair in pairs if pair.kind == kind} == {True, False}, kind
        # No answer can be both right and wrong for one gold.
        judged = [(pair.golds, pair.answer) for pair in pairs if pair.kind == kind]
        assert len(judged) == len(set(judged)), kind


def test_a_line_of_no_known_kind_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"pairs\.txt:2: expected .* found '\* 5'"):
        math_pairs.parse(["= 5", "* 5"], "pairs.txt")
    with pytest.raises(ValueError, match=r"pairs\.txt:1"):
        math_pairs.parse(["+ 5"], "pairs.txt")
