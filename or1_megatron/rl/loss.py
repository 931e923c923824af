"""The objectives: pointwise in a token's log-prob and entropy, summed over tokens (eq. 3.1 of the report).

They implement ``interfaces.Objective``: frozen and picklable, so that they travel to the ranks with their batch.

Shapes: all tensors are [N], N counted tokens of one micro-batch, in fp32; N may be 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_LARGEST_LOG_RATIO = 20.0
"""|log rho| is cut here, for exp() must stay finite: an infinite ratio behind a closed clip would still give a NaN
gradient (0 * inf). No sane update comes near e^20."""


@dataclass(frozen=True, slots=True)
class ClippedPolicyLoss:
    """Eq. 3.1 before its division by T_k: - sum_t { min(rho A, clip(rho, 1 - low, 1 + high) A) + alpha H }.

    rho = exp(log pi_theta - log pi_k), both at ``temperature``. No gradient flows through ``old_log_probs``.

    ``on_policy`` (N_SGD = 1): pi_k is pi_theta itself, so rho = exp(log pi_theta - stop_gradient(log pi_theta)): its
    value is 1 everywhere, its gradient that of log pi_theta, and the clip is never active. ``old_log_probs`` then
    holds the *engine's* log-probs, which enter no gradient and only serve to measure how far engine and policy differ.

    Worked example (low = high = 0.2, alpha = 0.1), three tokens:
        rho 1.5, A  2, H 1: min(3.0, 1.2 * 2)   =  2.4, clipped, no gradient
        rho 0.5, A -1, H 0: min(-0.5, 0.8 * -1) = -0.8, clipped, no gradient
        rho 1.1, A  1, H 2: min(1.1, 1.1)       =  1.1, d/d log pi = rho A = 1.1
        loss = -(2.4 - 0.8 + 1.1) - 0.1 * (1 + 0 + 2) = -3.0
    """

    clip_low: float
    clip_high: float
    entropy_coefficient: float
    """alpha_k. At 0 the entropies stay out of the graph altogether."""
    temperature: float
    on_policy: bool

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """(loss, sums). The sums: ``loss``, ``policy_loss`` (the loss without the bonus), ``entropy``, ``ratio``,
        ``clipped`` (tokens whose clipped term was the smaller one), ``approx_kl``, and of d = log pi_theta -
        old_log_probs: ``abs_log_ratio`` (sum of |d|), ``max_abs_log_ratio``.

        ``approx_kl`` is the k3 estimator of KL(old || pi_theta) on old's samples: exp(d) - 1 - d per token. When on
        policy, "old" in the last three is the engine.
        """
        reference = log_probs.detach() if self.on_policy else old_log_probs.detach()
        ratio = (log_probs - reference).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
        free = ratio * advantages
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        policy_loss = -torch.minimum(free, clipped).sum()
        loss = policy_loss
        if self.entropy_coefficient != 0.0:
            loss = policy_loss - self.entropy_coefficient * entropies.sum()
        with torch.no_grad():
            difference = log_probs - old_log_probs
            bounded = difference.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
            sums = {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "entropy": entropies.detach().sum(),
                "ratio": ratio.detach().sum(),
                "clipped": (clipped < free).sum().to(log_probs.dtype),
                # expm1, since exp(d) - 1 - d cancels to noise for the small d that matter.
                "approx_kl": (bounded.expm1() - bounded).sum(),
                "abs_log_ratio": difference.abs().sum(),
                "max_abs_log_ratio": _largest(difference.abs()),
            }
        return loss, sums


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Supervised loss on the same path: - sum_t log pi_theta(target_t). Advantages and old log-probs are ignored."""

    temperature: float = 1.0

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """(loss, sums); the sums: ``loss``, ``entropy``."""
        loss = -log_probs.sum()
        return loss, {"loss": loss.detach(), "entropy": entropies.detach().sum()}


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The maximum of non-negative values; 0 of none."""
    return values.max() if values.numel() else values.new_zeros(())
