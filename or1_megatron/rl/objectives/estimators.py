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
"""|log rho| is clamped to this value, so that exp() stays finite. An infinite ratio that is clipped would give a NaN
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
    """Return (importance weights w [N], mask [N] of the weights that were cut) from the log-probs of policy and engine.

    The engine samples from pi_engine, but the loss treats the samples as drawn from pi_k. w = pi_k / pi_engine corrects
    this, and the cap bounds the variance. Mode ``truncated`` takes min(w, cap) (TIS: Yao et al. 2025, "Your Efficient
    RL Framework Secretly Brings You Off-Policy RL Training"). Mode ``masked`` sets w to 0 outside [floor, cap] (token
    level: IcePop, arXiv 2510.18855, with 0.5 and 5; other levels: MIS, Liu et al. 2025, "When Speed Kills Stability").
    ``floor`` None means 1 / cap.

    At ``level`` token, w is the token's own ratio. At level sequence, w is the product of the ratios of all tokens
    in the token's sequence. At level geometric, w is their geometric mean. Both of these levels need ``sequences``.

    Worked example, cap 2: w = 3, 1.5, 0.25 become 2, 1.5, 0.25 (truncated) or 0, 1.5, 0 (masked). As one sequence they
    have the product 1.125 and the geometric mean 1.125^(1/3) = 1.040; neither is cut.
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
    """Return Schulman's k3 estimator [N] of KL(p || q) from samples of p: r - log r - 1 with r = q / p (RECIPE 1).

    Args:
        of_samples: log p of the sampled tokens.
        other: log q of the same tokens.

    Worked example: p = 1/2, q = 1/4 give r = 1/2 and k3 = 1/2 + ln 2 - 1 = 0.193. d k3 / d log p = 1 - r = 1/2.
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
    """Return for each token sampled from p an estimate [N] of KL(p || q); no estimate is negative.

    ``of_samples`` is log p of the tokens, ``other`` log q. ``k2`` is (log p - log q)^2 / 2; ``k3`` is the function
    ``k3``. Values above ``cap`` are cut to the cap and have gradient 0.

    In expectation under p, k2's gradient by p's parameters is the gradient of KL(p || q), and k3's is the gradient of
    KL(q || p) (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation", arXiv 2506.09477).

    Worked example: p = 1/2, q = 1/4 give k2 0.240 and k3 0.193, with gradients 0.693 and 1/2. log p - log q = -3 gives
    k3 = e^3 - 3 - 1 = 16.1 with gradient -19.1; a cap of 10 makes them 10 and 0.
    """
    value = 0.5 * (of_samples - other).square() if estimator == "k2" else k3(of_samples, other)
    return value if cap is None else value.clamp(max=cap)


def largest(values: Tensor) -> Tensor:
    """Return the maximum of non-negative values; 0 when there are none."""
    return values.max() if values.numel() else values.new_zeros(())


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply the values by the aggregation's token weights, unless ``weights`` is None."""
    return values if weights is None else values * weights


def no_tokens(values: Tensor) -> Tensor:
    """Return a mask [N] that is False everywhere."""
    return torch.zeros_like(values, dtype=torch.bool)
