"""Clip-Cov: no gradient for a few tokens of high covariance (Cui et al. 2025, arXiv 2505.22617, eq. 11 and 12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from or1_megatron.interfaces import Scope, TokenInputs
from or1_megatron.rl.objectives.clipped import clipped_term
from or1_megatron.rl.objectives.covariance import covariances, shuffled
from or1_megatron.rl.objectives.estimators import ratio_of
from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, Surrogate


@dataclass(frozen=True, slots=True)
class ClipCov(PolicyGradientLoss):
    """J as in the clipped loss, but constant for floor(share N) of the mini-batch's N tokens.

    They are drawn at random among the tokens with ``lowest`` <= covariance <= ``highest`` that the ratio's clip leaves
    open (``covariances``), all of them where there are fewer. A larger share or a lower ``lowest`` keeps entropy up.

    Worked example (share 1/2, lowest 1, highest 5, ratio 1): log pi (0, -1, -2, -5), A (2, 1, -1, -2): the means are -2
    and 0, the covariances (4, 1, 0, 6). The first two are chosen: the gradients d J / d log pi are (0, 0, -1, -2).
    """

    own_scope: ClassVar[Scope] = "batch"

    clip_low: float
    clip_high: float
    share: float = 2e-4
    """The paper's r. Unit: share of tokens."""
    lowest: float = 1.0
    """omega_low. Unit: nats times advantage. The paper's for Qwen2.5-7B: 1."""
    highest: float = 5.0
    """omega_high. The paper's: 5."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and self.lowest <= self.highest):
            raise ValueError(
                f"share = {self.share:g}, lowest = {self.lowest:g}, highest = {self.highest:g}; expected a share above "
                "0 and at most 1, and lowest at most highest"
            )

    def surrogate(self, log_probs: Tensor, old: Tensor, tokens: TokenInputs) -> Surrogate:
        ratio, count = ratio_of(log_probs, old), len(log_probs)
        values, closed = clipped_term(ratio, tokens.advantages, self.clip_low, self.clip_high)
        covariance = covariances(log_probs, tokens.advantages)
        candidate = (covariance >= self.lowest) & (covariance <= self.highest) & ~closed
        # The engine's log-probs have the same bits in every layout; the policy's differ in the last one.
        sampled = tokens.old_log_probs if tokens.engine_log_probs is None else tokens.engine_log_probs
        order = shuffled(self.seed, tokens.whole, sampled, tokens.advantages)
        chosen = torch.zeros_like(closed)
        chosen[order[candidate[order]][: int(self.share * count)]] = True
        values = torch.where(chosen, values.detach(), values)
        return Surrogate(values, ratio, closed, {"selected": chosen.sum(dtype=ratio.dtype)})
