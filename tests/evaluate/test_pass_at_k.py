"""avg@k and pass@k by hand, their intervals by enumeration, by another bootstrap and by what they promise.

Not proven here: that real models' samples are independent; the intervals suppose it.
"""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from or1_megatron.evaluate.pass_at_k import pass_at, passed


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one() -> None:
    """The oracle counts all subsets of size k of n = 6 samples with c right, for every c and k; k = 1 is the mean."""
    for right in range(7):
        outcomes = [1] * right + [0] * (6 - right)
        for k in range(1, 7):
            subsets = list(combinations(outcomes, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at(6, k)[right] == pytest.approx(expected)
    with pytest.raises(ValueError, match="pass@7 needs at least 7 samples"):
        pass_at(6, 7)


def test_the_samples_interval_is_that_of_all_outcomes_enumerated() -> None:
    """Two problems, 4 samples each, 1 and 4 of them right: all 2^8 outcomes under chances 1.5/5 and 4.5/5, weighted,
    give the standard deviation of avg@4 and pass@2; the interval is 1.96 of it on either side, cut at 0 and 1."""
    rewards = np.array([[1, 0, 0, 0], [1, 1, 1, 1]], dtype=np.float64)
    chances = np.repeat([1.5 / 5, 4.5 / 5], 4)
    outcomes = np.array(list(product((0, 1), repeat=8)))
    likely = np.where(outcomes == 1, chances, 1 - chances).prod(axis=1)
    pairs = np.array(
        [
            [outcome[list(pair)].any() for pair in combinations(range(4), 2)]
            + [outcome[[4 + place for place in pair]].any() for pair in combinations(range(4), 2)]
            for outcome in outcomes
        ]
    )
    for score, estimates in ((passed(rewards, 1), outcomes.mean(axis=1)), (passed(rewards, 2), pairs.mean(axis=1))):
        deviation = np.sqrt(likely @ estimates**2 - (likely @ estimates) ** 2)
        assert score.samples.low == pytest.approx(max(0.0, score.value - 1.96 * deviation))
        assert score.samples.high == pytest.approx(min(1.0, score.value + 1.96 * deviation))


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """150 evaluations of 40 problems whose chances are uniform: the truth of the very problems, and of their kind."""
    rng = np.random.default_rng(0)
    hits = {"avg samples": 0, "avg problems": 0, "pass samples": 0, "pass problems": 0}
    rounds = 150
    for _ in range(rounds):
        chances = rng.random(40)
        rewards = (rng.random((40, 8)) < chances[:, None]).astype(np.float64)
        mean, four = passed(rewards, 1), passed(rewards, 4)
        truth = 1 - (1 - chances) ** 4
        hits["avg samples"] += mean.samples.low <= chances.mean() <= mean.samples.high
        hits["avg problems"] += mean.problems.low <= 0.5 <= mean.problems.high
        hits["pass samples"] += four.samples.low <= truth.mean() <= four.samples.high
        hits["pass problems"] += four.problems.low <= 0.8 <= four.problems.high  # E[1 - (1 - u)^4] = 4/5
    assert all(0.90 <= hit / rounds <= 1.0 for hit in hits.values()), hits


def test_a_set_solved_entirely_is_not_certain() -> None:
    score = passed(np.ones((30, 4)), 1)
    assert score.value == 1.0
    assert score.samples.low < 1.0 and score.samples.high == 1.0
