"""Importance ratios and weights, and estimators of a KL divergence from the log-probs of sampled tokens.

The estimators k2 and k3 are Schulman's ("Approximating KL Divergence", 2020). Shapes: [N] tokens.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from or1_megatron.config.algorithm import CorrectionLevel, KLEstimator
from or1_megatron.interfaces import Sequences

LARGEST_LOG_RATIO: Final = 20.0
"""|log rho| is clamped to this, so that exp() stays finite: an infinite ratio behind a closed clip would give a NaN
gradient (0 * inf). No sane update comes near e^20."""


def ratio_of(log_probs: Tensor, old: Tensor) -> Tensor:
    """Return rho = exp(log_probs - old)."""
    return (log_probs - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def correction_weights(
    policy: Tensor,
    engine: Tensor,
    mode: Literal["truncated", "masked"],
    cap: float,
    level: CorrectionLevel = "token",
    sequences: Sequences | None = None,
    floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (importance weights w [N], which of them were cut [N]) from two log-probs of the sampled tokens.

    The engine samples from pi_engine, and the loss treats the samples as pi_k's. w = pi_k / pi_engine corrects this;
    the cap bounds its variance. ``truncated``: min(w, cap) (TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"); ``masked``: w within [floor, cap], else 0 (token: IcePop, arXiv 2510.18855,
    with 0.5 and 5; sequence and geometric: MIS, Liu et al. 2025, "When Speed Kills Stability"); ``floor`` None means
    1 / cap.

    ``level`` token: w is the token's ratio; sequence: the product of the ratios of the token's sequence; geometric:
    the geometric mean of these ratios. The last two need ``sequences``.

    Worked example, cap 2: w = 3, 1.5, 0.25 become 2, 1.5, 0.25 (truncated) or 0, 1.5, 0 (masked). As one sequence:
    product 1.125, geometric mean 1.125^(1/3) = 1.040; neither is cut.
    """
    difference = policy - engine
    if level != "token":
        if sequences is None:
            raise ValueError(f"a correction at the level {level} needs whole sequences; TokenInputs has none")
        difference = sequences.spread((sequences.sum if level == "sequence" else sequences.mean)(difference))
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if mode == "truncated":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio > cap) | (ratio < (1.0 / cap if floor is None else floor))
    return ratio.masked_fill(outside, 0.0), outside


def k3(of_samples: Tensor, other: Tensor) -> Tensor:
    """Return Schulman's k3 estimator of KL(p || q) from samples of p: r - log r - 1, r = q / p (RECIPE section 1). [N].

    Args:
        of_samples: log p of the sampled tokens.
        other: log q of the same tokens.

    Worked example: p = 1/2, q = 1/4: r = 1/2, 1/2 + ln 2 - 1 = 0.193. d k3 / d log p = 1 - r = 1/2.
    """
    difference = (other - of_samples).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    # expm1, because exp(d) - 1 - d cancels to noise for the small d that matter.
    return difference.expm1() - difference


def kl_estimate(
    of_samples: Tensor,
    other: Tensor,
    estimator: KLEstimator = "k3",
    cap: float | None = None,
) -> Tensor:
    """Return an estimate of KL(p || q) per sampled token, which is never negative. [N].

    ``k2``: (log p - log q)^2 / 2; ``k3``: as above. ``cap``: larger values become this, without gradient.

    In the mean under p, k2's gradient by p's parameters is that of KL(p || q), k3's is that of KL(q || p) (Tang and
    Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL", arXiv 2506.09477).

    Worked example, p = 1/2, q = 1/4: k2 0.240, k3 0.193; their gradients 0.693 and 1/2. log p - log q = -3: k3 is
    e^3 - 3 - 1 = 16.1; capped at 10 it is 10 with gradient 0 instead of -19.1.
    """
    value = 0.5 * (of_samples - other).square() if estimator == "k2" else k3(of_samples, other)
    return value if cap is None else value.clamp(max=cap)


def largest(values: Tensor) -> Tensor:
    """Return the maximum of non-negative values; 0 when there are none."""
    return values.max() if values.numel() else values.new_zeros(())


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the values times the aggregation's weights."""
    return values if weights is None else values * weights


def no_tokens(values: Tensor) -> Tensor:
    """Return a mask [N] that is False everywhere."""
    return torch.zeros_like(values, dtype=torch.bool)
