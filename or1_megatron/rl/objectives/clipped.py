"""The recipe's objective: PPO's clipped surrogate (the paper's eq. 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from or1_megatron.interfaces import TokenInputs
from or1_megatron.rl.objectives.estimators import no_tokens, ratio_of
from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, Surrogate


@dataclass(frozen=True, slots=True)
class ClippedPolicyLoss(PolicyGradientLoss):
    """J = min(rho A, clip(rho, 1 - low, 1 + high) A). With dual clip c, tokens with A < 0 have max(J, c A) instead.

    rho = exp(log pi_theta - log pi_old), with both log-probs at ``temperature``. log pi_old is the constant
    ``TokenInputs.old_log_probs``. Dual clip: Ye et al. 2020, arXiv 1912.09729.

    The loss is -(sum of J) - alpha (sum of H). H is a token's entropy; ``PolicyGradientLoss`` adds the entropy term.

    Worked example (low = high = 0.2, alpha = 0.1), three tokens:
        rho 1.5, A  2, H 1: min(3.0, 1.2 * 2)   =  2.4, clipped, no gradient
        rho 0.5, A -1, H 0: min(-0.5, 0.8 * -1) = -0.8, clipped, no gradient
        rho 1.1, A  1, H 2: min(1.1, 1.1)       =  1.1, d/d log pi = rho A = 1.1
        loss = -(2.4 - 0.8 + 1.1) - 0.1 * (1 + 0 + 2) = -3.0
    Dual clip 3, rho 4, A -1: min(-4, -1.2) = -4, max(-4, 3 * -1) = -3, no gradient.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    """The dual clip's c > 1; None: no dual clip."""

    def surrogate(self, log_probs: Tensor, old: Tensor, tokens: TokenInputs) -> Surrogate:
        ratio, advantages = ratio_of(log_probs, old), tokens.advantages
        values, closed = clipped_term(ratio, advantages, self.clip_low, self.clip_high)
        floored = no_tokens(values)
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            floored = (advantages < 0) & (values < floor)
            values = torch.where(floored, floor, values)
        return Surrogate(values, ratio, closed, {"clipped_dual": floored.sum(dtype=ratio.dtype)})


def clipped_term(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return min(rho A, clip(rho, 1 - low, 1 + high) A) [N], and a mask [N]: whether the clipped product is smaller."""
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, clipped), clipped < free
