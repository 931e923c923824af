"""GSPO: the importance ratio of a whole response (Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from or1_megatron.config.algorithm import AlgorithmConfig
from or1_megatron.interfaces import Scope, TokenInputs
from or1_megatron.rl.objectives.clipped import clipped_term
from or1_megatron.rl.objectives.estimators import LARGEST_LOG_RATIO, ratio_of
from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, Surrogate


@dataclass(frozen=True, slots=True)
class GSPO(PolicyGradientLoss):
    """J = min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i), s_i = (pi_theta(y_i) / pi_old(y_i))^(1 / |y_i|)

    All tokens of response i have the same J, so ``response_mean`` gives the mean over responses, the paper's eq. 5. The
    paper's low and high are 3e-4 and 4e-4, because the geometric mean s_i moves far less than a token's ratio.

    On policy and without a correction, s_i is 1. The loss then uses each token's own ratio: the gradient is the same,
    and the scope is only "token". A correction w_t multiplies J at each token and leaves s_i unchanged.

    Worked example (low = high = 0.2): two tokens with rho 1.5 and 1.2, A 2 have s = sqrt(1.8) = 1.342, clipped: J =
    2.4, no gradient. With rho 1.1 and 1.0, s = sqrt(1.1) = 1.0488 and J = 2.0976 at both tokens; the gradient of the
    sum of J by the log pi of either token is 2 * s A / 2 = 2.0976.
    """

    own_scope: ClassVar[Scope] = "sequence"

    clip_low: float
    clip_high: float

    @property
    def scope(self) -> Scope:
        return "token" if self._pointwise else "sequence"

    @property
    def _pointwise(self) -> bool:
        return self.on_policy and self.correction == "off"

    def surrogate(self, log_probs: Tensor, old: Tensor, tokens: TokenInputs) -> Surrogate:
        if self._pointwise:
            ratio = ratio_of(log_probs, old)
        else:
            log_ratio = tokens.whole.mean(log_probs - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
            ratio = tokens.whole.spread(log_ratio.exp())
        values, closed = clipped_term(ratio, tokens.advantages, self.clip_low, self.clip_high)
        return Surrogate(values, ratio, closed)

    @classmethod
    def contradictions(cls, algorithm: AlgorithmConfig) -> Iterator[str]:
        if algorithm.loss.aggregation != "response_mean":
            yield (
                f"algorithm.objective.name = gspo is a mean over responses, but algorithm.loss.aggregation = "
                f"{algorithm.loss.aggregation} counts a response by its tokens; set it to response_mean"
            )
