"""Computes avg@k, pass@k and best@k in NumPy, avg@k and pass@k with confidence intervals.

Rewards are [P problems, n samples], 1 for right and 0 for wrong. avg@k is the mean reward of k samples per problem.
pass@k is the chance that at least one of k samples is right, estimated without bias from n >= k samples of which c were
right: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374).

There are two intervals. ``samples`` says how the score varies with new samples of the same problems (a second run of
the evaluation): 1.96 standard deviations of the estimate. Each problem's chance of success is taken as (c + 1/2) /
(n + 1), which is never 0 or 1. ``problems`` says how the score varies with new problems of this kind, for claims about
a skill: a percentile bootstrap over problems, usually wider. (A bootstrap over samples would bias pass@k down.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 2000
_SEED: Final = 20250522
_TAIL: Final = 2.5  # per cent on either side
_NORMAL: Final = 1.96

Rewards = NDArray[np.float64]  # [P, n]
Estimates = NDArray[np.float64]  # [n + 1]: a problem's estimate, by how many of its n samples were right


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Score:
    """A score in [0, 1] with its two 95% intervals, for new samples and for new problems."""

    value: float
    samples: ConfidenceInterval
    problems: ConfidenceInterval


def pass_at(n: int, k: int) -> Estimates:
    """Return estimates [n + 1] of pass@k: entry i for i right samples. Raises ValueError unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, found {n}")
    return np.array([1.0 - math.comb(n - right, k) / math.comb(n, k) for right in range(n + 1)])


def best_at(rewards: Rewards, k: int) -> float:
    """Return best@k: the highest reward of k samples, averaged over all choices of k samples. With rewards 0 and 1 it
    equals pass@k."""
    n = rewards.shape[1]
    highest = [math.comb(below, k - 1) / math.comb(n, k) for below in range(n)]
    return float((np.sort(rewards, axis=1) @ highest).mean())


def sizes(n: int) -> list[int]:
    """Return the values of k for which pass@k of n samples is reported: powers of two below n, and n."""
    return sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < n} | {n})


def passed(rewards: Rewards, k: int) -> Score:
    """Return pass@k with its intervals; for k = 1 this is avg@n.

    The bootstrap draws from a histogram of the estimates, because problems with equal estimates are interchangeable.
    """
    estimates, right = pass_at(rewards.shape[1], k), rewards.sum(axis=1).astype(int)
    values = estimates[right]
    count, value = len(values), float(values.mean())
    spread = _NORMAL * math.sqrt(float(_variances(estimates)[right].mean()) / count)
    kinds, times = np.unique(values, return_counts=True)
    others = np.random.default_rng(_SEED).multinomial(count, times / count, RESAMPLES) @ kinds / count
    low, high = np.percentile(others, [_TAIL, 100 - _TAIL])
    return Score(
        value,
        ConfidenceInterval(max(0.0, value - spread), min(1.0, value + spread)),
        ConfidenceInterval(float(low), float(high)),
    )


def _variances(estimates: Estimates) -> Estimates:
    """Return [n + 1] variances of a problem's estimate from n new samples: entry i if i of n old samples were right."""
    n = len(estimates) - 1
    right = np.arange(n + 1)
    chance = ((right + 0.5) / (n + 1))[:, None]
    ways = np.array([math.lgamma(n + 1) - math.lgamma(x + 1) - math.lgamma(n - x + 1) for x in range(n + 1)])
    likely = np.exp(ways + right * np.log(chance) + (n - right) * np.log1p(-chance))  # [right, drawn]
    return np.clip(likely @ estimates**2 - (likely @ estimates) ** 2, 0.0, None)
