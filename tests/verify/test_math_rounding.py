r"""``verify.math.rounding``: an exact answer is right where it rounds to the digits that a decimal gold shows.

Oracles: labelled pairs, figures worked by hand, and Python's decimal arithmetic. Not proven: that a data set's golds
were rounded half away from zero, and not cut off; 0.66 for two thirds stays refused.
"""

from __future__ import annotations

import json
import random
from decimal import ROUND_HALF_UP, Decimal

import math_pairs
import pytest
from pydantic import ValidationError

from or1_verify.config import MathConfig
from or1_verify.math.reader.judge import judge
from or1_verify.math.reader.normalization import Unreadable
from or1_verify.math.verifier import MathVerifier
from or1_verify.types import Message, Problem

TUNING = math_pairs.load("tuning_rounding")


def accepted(gold: str, answer: str, rounding: bool = True) -> bool:
    try:
        return judge(gold, answer, rounding)[0]
    except Unreadable:
        return False


def agrees(pair: math_pairs.Pair, rounding: bool = True) -> bool:
    return any(accepted(gold, pair.answer, rounding) for gold in pair.golds) == pair.right


@pytest.mark.parametrize("kind", sorted({pair.kind for pair in TUNING}))
def test_labelled_pairs_of_the_tuning_half(kind: str) -> None:
    for pair in (pair for pair in TUNING if pair.kind == kind):
        assert agrees(pair), pair


def test_rates_on_the_frozen_half() -> None:
    pairs = math_pairs.load("frozen_rounding")
    assert [pair for pair in pairs if not agrees(pair)] == []
    assert sum(pair.right and not agrees(pair, rounding=False) for pair in pairs) >= 15  # what the rule is for


def test_random_fractions_against_decimal_arithmetic() -> None:
    rng = random.Random(3)
    for _ in range(400):
        top, under, digits = rng.randint(-900, 900), rng.randint(2, 60), rng.randint(1, 4)
        exact = Decimal(top) / Decimal(under)  # 28 digits: a tie would end within them
        gold = exact.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
        if abs(gold) < 10 ** (1 - digits) or gold == exact:
            continue  # fewer than two significant digits, or nothing was rounded
        answer = rf"\frac{{{top}}}{{{under}}}"
        assert accepted(str(gold), answer), (gold, answer)
        assert not accepted(str(gold), answer, rounding=False), (gold, answer)
        last = Decimal(1).scaleb(-digits)
        for near in (gold + last, gold - last):
            assert not accepted(str(near), answer), (near, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("0.145", r"\frac{29}{200}", True),
        ("0.15", r"\frac{29}{200}", True),  # 0.145 is a tie in tenths of a cent, and goes up
        ("0.14", r"\frac{29}{200}", False),
        ("1.15", r"\frac{23}{20}", True),  # binary floats would say 1.1 for one digit
        ("-1.2", r"-\frac{23}{20}", True),
        ("1,234.57", r"\frac{8642}{7}", True),
        (r"\pm 1.73", r"\pm\sqrt{3}", True),
        (
            r"\text{min: } 0.33, \text{ max: } 0.67",
            r"\text{maximum: } \frac23, \text{ minimum: } \frac13",
            True,
        ),
        ("(A) 0.33", r"\frac13", True),
        ("57.30^\\circ", r"\frac{180}{\pi}", False),  # a bare pi is radians
        ("0.05", r"\frac{1}{19}", False),  # one significant digit
        ("2.72", "e", True),
        ("3.14", r"3.1 + \frac{4}{100}", False),
        ("5.00", r"\sqrt{25}", False),  # left to be worked out
        ("1.00", r"\frac{99.9}{100}", False),
        ("0.33", "i", False),
        ("1.41", r"\sqrt{2} + 10^{-60}", True),
        ("1.41", r"9^{9^9}", False),
    ],
)
def test_hand_worked_cases(gold: str, answer: str, right: bool) -> None:
    assert accepted(gold, answer) == right


def test_only_exact_answers_to_decimal_golds_are_judged_otherwise() -> None:
    """On all other labelled pairs: what the rule accepts in addition has a decimal gold, and nothing is refused."""
    for pair in math_pairs.load("frozen") + math_pairs.load("frozen_2"):
        for gold in pair.golds:
            off, on = accepted(gold, pair.answer, rounding=False), accepted(gold, pair.answer)
            assert on >= off, pair
            assert on == off or "." in gold, pair


def test_through_the_worker_and_the_configuration() -> None:
    problem = Problem("id", "s", "math", (Message("user", "q"),), json.dumps(["85.71"]), {}, "x.jsonl:1")
    for rounding, status in ((False, "wrong"), (True, "right")):
        verifier = MathVerifier(60.0, MathConfig(rounding=rounding))
        try:
            verdicts = [
                verifier.verify(problem, rf"</think>\boxed{{{answer}}}", truncated=False).status
                for answer in (r"\frac{600}{7}", "600/7", "85.714")
            ]
        finally:
            verifier.close()
        assert verdicts == [status, status, "wrong"]
    assert not MathConfig().rounding
    with pytest.raises(ValidationError, match=r"rounding is a rule of the judge own, and .* is math_verify"):
        MathConfig(judge="math_verify", rounding=True)
