"""KL-Cov: a penalty on moving the tokens of highest covariance (Cui et al. 2025, arXiv 2505.22617, eq. 13 and 14)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from or1_megatron.interfaces import Scope, TokenInputs
from or1_megatron.rl.objectives.covariance import covariances
from or1_megatron.rl.objectives.estimators import no_tokens, ratio_of
from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, Surrogate


@dataclass(frozen=True, slots=True)
class KLCov(PolicyGradientLoss):
    """J = rho A, and for the floor(share N) tokens of highest covariance rho A - penalty |log pi_old - log pi_theta|

    The paper writes KL(pi_old || pi_theta) for the last term; its authors' code estimates it by the absolute value.
    There is no clip of the ratio. On policy the penalty is 0 and has no gradient.

    Worked example (share 1/3, penalty 1, rho 1.2): log pi (0, -2, -1), A (1, 0, -1): the means are -1 and 0, the
    covariances (1, 0, 0). The first is chosen: J = (1.2 - ln 1.2, 0, -1.2), with gradients (1.2 - 1, 0, -1.2).
    """

    own_scope: ClassVar[Scope] = "batch"

    share: float = 2e-4
    """The paper's k: 2e-3 for Qwen2.5-7B, 2e-4 for 32B. Unit: share of tokens."""
    penalty: float = 1.0
    """The paper's beta."""

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and self.penalty > 0):
            raise ValueError(
                f"share = {self.share:g}, penalty = {self.penalty:g}; expected a share above 0 and at most 1, and a "
                "penalty above 0"
            )

    def surrogate(self, log_probs: Tensor, old: Tensor, tokens: TokenInputs) -> Surrogate:
        ratio = ratio_of(log_probs, old)
        order = covariances(log_probs, tokens.advantages).sort(descending=True, stable=True).indices
        chosen = no_tokens(ratio)
        chosen[order[: int(self.share * len(order))]] = True
        moved = torch.where(chosen, (old - log_probs).abs(), torch.zeros_like(log_probs))
        values = ratio * tokens.advantages - self.penalty * moved
        return Surrogate(values, ratio, no_tokens(ratio), {"selected": chosen.sum(dtype=ratio.dtype)})
