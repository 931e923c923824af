"""Decides the refill (DAPO's dynamic sampling): how many prompts are sampled, and which of them form the result."""

from __future__ import annotations

import math

from or1_megatron.types import Group, RefillRule

_CAUTION = 0.25
"""The rejected share is an average of the judged groups' share and the expected share. The expected share weighs as
much as ``_CAUTION`` * n judged groups, where n is the number of groups wanted."""


class SamplingBudget:
    """Decides how many of a rollout's prompts, counted from the first, are sampled, and how many are the result.

    Without ``refill`` all prompts are sampled, and all are the result. With ``refill`` the result is the shortest
    prefix of the prompts with enough kept groups, whatever the order of the verdicts. A prompt that is requested late
    costs the time of a whole response. So engines may sample more prompts than needed on average: as many as give
    enough groups even if the kept groups are two standard deviations below their mean.

    Worked example, 30 groups wanted of 100 prompts, a share of 0.4 rejections expected: of 63 prompts 37.8 are kept on
    average, with a standard deviation of sqrt(63 * 0.4 * 0.6) = 3.9, and 37.8 - 2 * 3.9 = 30.0.
    """

    def __init__(self, prompts: int, refill: RefillRule | None) -> None:
        self._prompts, self._refill = prompts, refill
        self._kept: dict[int, bool] = {}
        self.limit = prompts
        """Number of prompts that make up the result once the rollout is ``over``; until then an upper bound."""
        self.over = False

    def wants(self, prompt_index: int) -> bool:
        """Return whether a prompt may be part of the result, by the groups that have been judged so far."""
        return prompt_index < self.limit

    @property
    def allowed(self) -> int:
        """Return n: requests for the first n prompts may be sent to the engines now."""
        if self._refill is None:
            return self._prompts
        wanted, judged, kept = self._refill.kept, len(self._kept), sum(self._kept.values())
        before = _CAUTION * wanted
        rejected = (self._refill.expected_rejected * before + judged - kept) / (before + judged)
        return min(judged + _enough(max(0, wanted - kept), rejected, self._prompts), self.limit)

    def judged(self, prompt_index: int, group: Group) -> bool:
        """Take a group whose responses all have verdicts. Returns whether fewer prompts may be wanted now."""
        self._kept[prompt_index] = self._refill is None or bool(self._refill.keeps(group))
        wanted = self._prompts if self._refill is None else self._refill.kept
        kept_ones = sorted(index for index, kept in self._kept.items() if kept)
        if len(kept_ones) >= wanted:
            self.limit = kept_ones[wanted - 1] + 1
        self.over = all(index in self._kept for index in range(self.limit))
        return self.over or self.limit < self._prompts


def _enough(wanted: int, rejected_share: float, most: int) -> int:
    """Return the smallest n <= ``most`` with n * k - 2 * sqrt(n * k * r) >= wanted. r: rejected share; k: 1 - r."""
    kept_share = 1 - rejected_share
    if wanted == 0 or kept_share <= 0:
        return 0 if wanted == 0 else most
    spread = 2 * math.sqrt(kept_share * rejected_share)
    root = (spread + math.sqrt(spread**2 + 4 * kept_share * wanted)) / (2 * kept_share)
    return min(math.ceil(root**2 - 1e-9), most)
