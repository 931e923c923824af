"""CISPO: the clipped ratio as a constant weight of log pi (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from or1_megatron.interfaces import TokenInputs
from or1_megatron.rl.objectives.estimators import ratio_of
from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, Surrogate


@dataclass(frozen=True, slots=True)
class CISPO(PolicyGradientLoss):
    """J = stop_gradient(clip(rho, 1 - low, 1 + high)) A log pi_theta

    A clip bounds a token's weight but keeps its gradient. The paper sets no lower bound; ``clip_low`` 1 sets none.

    Worked example (low 1, high 0.2): rho 1.5, A 2, log pi -1 give J = 1.2 * 2 * -1 = -2.4 and d J / d log pi = 2.4.
    rho 0.5, A -1, log pi -2 give J = 0.5 * -1 * -2 = 1 and d J / d log pi = -0.5.
    """

    clip_low: float
    clip_high: float

    def surrogate(self, log_probs: Tensor, old: Tensor, tokens: TokenInputs) -> Surrogate:
        ratio = ratio_of(log_probs.detach(), old)
        weights = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return Surrogate(weights * tokens.advantages * log_probs, ratio, weights != ratio)
