"""The labelled pairs stay what they were frozen as: read whole, split by hash alone, both sides of every class.

Not proven here: that a label is what every grader would say (the policy is in docs/math_verifier.md).
"""

from __future__ import annotations

import hashlib

import math_pairs
import pytest
from math_pairs import Part

# The frozen files as they were committed before any rule was written. They are never edited, only added to elsewhere.
FROZEN_SHA256 = {
    "frozen": "88f191ed0cd6c2e245480c0cc86aac998560ee910d31f204dc3f16e92198fe36",
    "frozen_2": "61c364c03fed4511bd409127e1c59d2480ab219057546ba09830f09d0df08bfc",
    "frozen_3": "a6393934dc9348e5871899bf930c718f90dea3f023a297bb825aca92a8ac1fc2",
    "frozen_4": "10a03a04187e04348a339142c4978fd855760b2cb9cfdc54584d95f5e591fc17",
    "frozen_rounding": "90fe1e8d94c8266a81e82a531994f8c574c2e050f97ef4d49b01ee35a28938b9",
}


SETS = [
    ("tuning", "frozen", 3),
    ("tuning_2", "frozen_2", 2),
    ("tuning_3", "frozen_3", 2),
    ("tuning_4", "frozen_4", 2),
    ("tuning_rounding", "frozen_rounding", 2),
]


def test_the_frozen_files_are_the_ones_that_were_frozen() -> None:
    for part, digest in FROZEN_SHA256.items():
        assert hashlib.sha256((math_pairs.FOLDER / f"{part}.txt").read_bytes()).hexdigest() == digest, part


@pytest.mark.parametrize(("tuning", "frozen", "one_in"), SETS)
def test_the_hash_alone_says_which_golds_are_frozen(tuning: Part, frozen: Part, one_in: int) -> None:
    pairs = [math_pairs.load(tuning), math_pairs.load(frozen)]
    for kind in {pair.kind for part in pairs for pair in part}:
        ours, theirs = ({pair.golds for pair in part if pair.kind == kind} for part in pairs)
        assert theirs == math_pairs.frozen_golds(sorted(ours | theirs), kind, one_in), kind
        assert not ours & theirs, kind


@pytest.mark.parametrize(("tuning", "frozen", "one_in"), SETS)
def test_it_is_large_two_sided_and_without_repeats(tuning: Part, frozen: Part, one_in: int) -> None:
    pairs = math_pairs.load(tuning) + math_pairs.load(frozen)
    assert len(pairs) == len(set(pairs)) >= (100 if tuning == "tuning_rounding" else 300)
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
