"""Importance ratios, and estimators of a KL divergence from the log-probs of sampled tokens.

The estimators k2 and k3 are Schulman's ("Approximating KL Divergence", 2020). Shapes: [N] tokens.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from or1_megatron.config.algorithm import KLEstimator

LARGEST_LOG_RATIO: Final = 20.0
"""|log rho| is clamped to this, so that exp() stays finite: an infinite ratio behind a closed clip would give a NaN
gradient (0 * inf). No sane update comes near e^20."""


def ratio_of(log_probs: Tensor, old: Tensor) -> Tensor:
    """Return rho = exp(log_probs - old)."""
    return (log_probs - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


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
