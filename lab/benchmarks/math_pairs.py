"""The labelled pairs (gold, answer, verdict) that the math verifier is measured on: tests/data/math_pairs/*.txt.

A file is read line by line. ``@ class`` starts a class; ``= gold`` starts a gold (``= one || two``: several acceptable
golds). Each line ``+ answer`` or ``- answer`` below is a right or a wrong answer to this gold, as the final box has it.
docs/math_verifier.md says what counts as right.

A third of the golds is frozen: rules are tuned on tuning.txt, and results are reported on frozen.txt. Nobody chose
which gold is in which file: within each class, golds are ordered by their SHA-256, and the first of every three is
frozen. All answers to a gold are in one file, so that no rule can be tuned on a frozen gold's other answers. In four
more sets the first of every two golds is frozen: rarer notations (tuning_2.txt, tuning_3.txt), everyday notations with
near misses (tuning_4.txt), and pairs for ``verify.math.rounding`` (tuning_rounding.txt), whose labels hold with this
rule on. rules.txt is no sample: it holds the near misses with which each rule was tried, and similar answers that must
stay right. hostile.txt holds 13 rounds of answers by which a policy could be rewarded for nothing; each round was
written before it was judged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "math_pairs"
Part = Literal[
    "tuning",
    "frozen",
    "tuning_2",
    "frozen_2",
    "tuning_3",
    "frozen_3",
    "tuning_4",
    "frozen_4",
    "tuning_rounding",
    "frozen_rounding",
    "rules",
    "hostile",
]


@dataclass(frozen=True)
class Pair:
    """One labelled answer: the content of the final box, the acceptable golds, and whether a careful grader accepts."""

    kind: str
    golds: tuple[str, ...]
    answer: str
    right: bool


def load(part: Part) -> list[Pair]:
    """Return the pairs of one part, in the file's order.

    Raises:
        ValueError: a line is none of the four kinds, or an answer stands before any gold.
    """
    path = FOLDER / f"{part}.txt"
    return parse(path.read_text(encoding="utf-8").split("\n"), path.name)


def parse(lines: Iterable[str], name: str) -> list[Pair]:
    """Return the pairs in the lines of a file. ``name``: the file's name, for errors."""
    pairs: list[Pair] = []
    kind, golds = "", ()
    for number, line in enumerate(lines, 1):
        mark, _, rest = line.partition(" ")
        if mark == "@":
            kind, golds = rest, ()
        elif mark == "=":
            golds = tuple(rest.split(" || "))
        elif mark in ("+", "-") and golds:
            pairs.append(Pair(kind, golds, rest, mark == "+"))
        elif line:
            raise ValueError(f"{name}:{number}: expected '@ class', '= gold', '+ answer' or '- answer', found {line!r}")
    return pairs


def frozen_golds(golds: Sequence[tuple[str, ...]], kind: str, one_in: int = 3) -> set[tuple[str, ...]]:
    """Return the golds of one class that are frozen: the first of every ``one_in`` in the order of their hashes."""
    ordered = sorted(golds, key=lambda gold: hashlib.sha256(" || ".join((kind, *gold)).encode()).hexdigest())
    return set(ordered[::one_in])
