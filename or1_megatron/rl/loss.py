"""The objectives: pointwise in a token's log-prob and entropy, summed over tokens (eq. 3.1 of the report).

They implement ``interfaces.Objective``. They are frozen and picklable, because each batch is sent to the ranks with its
objective. docs/changing_the_objective.md says how to change one.

Shapes: all tensors are [N], N counted tokens of one micro-batch, in fp32; N may be 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from or1_megatron.config.schema import AlgorithmConfig, StageConfig
from or1_megatron.interfaces import TokenInputs

_LARGEST_LOG_RATIO = 20.0
"""|log rho| is clamped to this, so that exp() stays finite: an infinite ratio behind a closed clip would give a NaN
gradient (0 * inf). No sane update comes near e^20."""


def k3(of_samples: Tensor, other: Tensor) -> Tensor:
    """Return Schulman's k3 estimator of KL(p || q) from samples of p: r - log r - 1, r = q / p (RECIPE section 1). [N].

    Args:
        of_samples: log p of the sampled tokens.
        other: log q of the same tokens.

    Worked example: p = 1/2, q = 1/4: r = 1/2, 1/2 + ln 2 - 1 = 0.193. d k3 / d log p = 1 - r = 1/2.
    """
    difference = (other - of_samples).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    # expm1, because exp(d) - 1 - d cancels to noise for the small d that matter.
    return difference.expm1() - difference


def correction_weights(
    policy: Tensor, engine: Tensor, mode: Literal["truncated", "masked"], cap: float
) -> tuple[Tensor, Tensor]:
    """Return (importance weights w [N], which of them were cut [N]) from two log-probs of the sampled tokens.

    The engine samples from pi_engine, and the loss treats the samples as pi_k's. w = pi_k / pi_engine corrects this;
    the cap bounds its variance. ``truncated``: min(w, cap) (TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"); ``masked``: w within [1 / cap, cap], else 0 (IcePop: Ling team 2025).

    Worked example, cap 2: w = 3, 1.5, 0.25 become 2, 1.5, 0.25 (truncated) or 0, 1.5, 0 (masked).
    """
    ratio = (policy - engine).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    if mode == "truncated":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio > cap) | (ratio < 1.0 / cap)
    return ratio.masked_fill(outside, 0.0), outside


@dataclass(frozen=True, slots=True)
class ClippedPolicyLoss:
    """Eq. 3.1 before its division by T_k, with the report's switches and other common ones:

        sum_t omega_t { - w_t J_t - alpha H_t + beta k3(pi_theta || pi_ref)_t }
        J = min(rho A, clip(rho, 1 - low, 1 + high) A), and where A < 0 with dual clip c: max(J, c A)

    rho = exp(log pi_theta - log pi_k), both at ``temperature``; log pi_k is ``TokenInputs.old_log_probs``, a constant.
    omega: the weights of the aggregation (``rl.batch.pack``), 1 for the recipe's token mean; w: ``correction_weights``.
    Dual clip: Ye et al. 2020, arXiv 1912.09729; k3: Schulman, "Approximating KL Divergence", 2020.

    ``on_policy`` (N_SGD = 1): pi_k is pi_theta itself, so rho = exp(log pi_theta - stop_gradient(log pi_theta)): its
    value is 1 everywhere, its gradient that of log pi_theta, and no clip is ever active. The engine's log-probs then
    only serve to measure how far engine and policy differ, and for w.

    Worked example (low = high = 0.2, alpha = 0.1), three tokens:
        rho 1.5, A  2, H 1: min(3.0, 1.2 * 2)   =  2.4, clipped, no gradient
        rho 0.5, A -1, H 0: min(-0.5, 0.8 * -1) = -0.8, clipped, no gradient
        rho 1.1, A  1, H 2: min(1.1, 1.1)       =  1.1, d/d log pi = rho A = 1.1
        loss = -(2.4 - 0.8 + 1.1) - 0.1 * (1 + 0 + 2) = -3.0
    Dual clip 3, rho 4, A -1: min(-4, -1.2) = -4, max(-4, 3 * -1) = -3, no gradient.
    """

    clip_low: float
    clip_high: float
    entropy_coefficient: float
    """alpha_k. At 0 the entropies are not part of the graph."""
    temperature: float
    on_policy: bool
    dual_clip: float | None = None
    """c > 1; None: off."""
    kl_coefficient: float = 0.0
    """beta. At 0 a KL to the reference is measured only."""
    correction: Literal["off", "truncated", "masked"] = "off"
    correction_cap: float = 2.0
    bonus_on: Literal["all", "clipped"] = "all"
    """clipped: only clipped tokens, whose J has no gradient, get the bonus. Beyond the report: at N_SGD >= 4 a bonus on
    every token makes entropy unstable (RECIPE section 2)."""

    def __call__(
        self, log_probs: Tensor, entropies: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return (loss, sums).

        Sums weighted by omega: ``loss``, ``policy_loss`` (the loss without the bonus). Sums over tokens: ``entropy``,
        ``ratio``, ``clipped`` (tokens whose clipped term was the smaller one) = ``clipped_low`` + ``clipped_high``,
        ``clipped_dual``, ``abs_log_ratio`` (|log pi_theta - log pi_old|) and ``approx_kl``, the k3 estimator of
        KL(pi_old || pi_theta); pi_old is the engine when on policy. Maxima: ``max_ratio``, ``max_inverse_ratio``,
        ``max_abs_log_ratio``. With a reference ``kl``; with a correction ``weight``, ``max_weight``, ``weight_cut``.
        """
        old = (log_probs if self.on_policy else tokens.old_log_probs).detach()
        ratio = (log_probs - old).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
        advantages = tokens.advantages
        free = ratio * advantages
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        surrogate = torch.minimum(free, clipped)
        closed = clipped < free
        floored = torch.zeros_like(closed)
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            floored = (advantages < 0) & (surrogate < floor)
            surrogate = torch.where(floored, floor, surrogate)
        correction: dict[str, Tensor] = {}
        if self.correction != "off":
            if tokens.engine_log_probs is None:
                raise ValueError("the importance correction needs the engine's log-probs; TokenInputs has none")
            weights, cut = correction_weights(old, tokens.engine_log_probs, self.correction, self.correction_cap)
            surrogate = weights * surrogate
            correction = {
                "weight": weights.sum(),
                "max_weight": _largest(weights),
                "weight_cut": cut.sum(dtype=weights.dtype),
            }
        per_token = -surrogate
        to_reference = None if tokens.reference_log_probs is None else k3(log_probs, tokens.reference_log_probs)
        if to_reference is not None and self.kl_coefficient != 0.0:
            per_token = per_token + self.kl_coefficient * to_reference
        policy_loss = _weighted(per_token, tokens).sum()
        loss = policy_loss
        if self.entropy_coefficient != 0.0:
            bonus = entropies if self.bonus_on == "all" else entropies * (closed | floored)
            loss = policy_loss - self.entropy_coefficient * _weighted(bonus, tokens).sum()
        with torch.no_grad():
            sums = {"loss": loss.detach(), "policy_loss": policy_loss.detach(), "entropy": entropies.detach().sum()}
            sums |= _ratio_sums(log_probs, tokens, ratio.detach())
            above = ratio > 1.0
            sums |= {
                "clipped": closed.sum(dtype=ratio.dtype),
                "clipped_low": (closed & ~above).sum(dtype=ratio.dtype),
                "clipped_high": (closed & above).sum(dtype=ratio.dtype),
                "clipped_dual": floored.sum(dtype=ratio.dtype),
            }
            if to_reference is not None:
                sums["kl"] = to_reference.detach().sum()
        return loss, sums | correction


def old_is_the_policy(algorithm: AlgorithmConfig, stale: bool) -> bool:
    """Whether rho's denominator is pi_k, the policy at the step's start, and not the weights that sampled.

    They differ only where older weights sampled (``stale``). Without a correction rho is then against the engines'
    log-probs, as in PPO. With one, w = pi_k / pi_engine corrects for the older weights, and rho measures only how far
    the step has moved: the decoupled objective of Hilton et al. 2021, arXiv 2110.00641.
    """
    return not stale or algorithm.correction.mode != "off"


def make_objective(
    algorithm: AlgorithmConfig, stage: StageConfig, alpha: float, clip_high: float, stale: bool = False
) -> ClippedPolicyLoss:
    """Return the objective of a step's updates, with the controllers' alpha_k and epsilon_high."""
    return ClippedPolicyLoss(
        clip_low=algorithm.loss.clip_low,
        clip_high=clip_high,
        entropy_coefficient=alpha,
        temperature=stage.temperature,
        on_policy=stage.sgd_steps == 1 and old_is_the_policy(algorithm, stale),
        dual_clip=algorithm.loss.dual_clip,
        kl_coefficient=algorithm.kl.coefficient,
        correction=algorithm.correction.mode,
        correction_cap=algorithm.correction.cap,
        bonus_on=algorithm.entropy.bonus_on,
    )


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Supervised loss on the same path: - sum_t omega_t log pi_theta(target_t)."""

    temperature: float = 1.0

    def __call__(
        self, log_probs: Tensor, entropies: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return (loss, sums ``loss`` and ``entropy``)."""
        loss = -_weighted(log_probs, tokens).sum()
        return loss, {"loss": loss.detach(), "entropy": entropies.detach().sum()}


def _weighted(values: Tensor, tokens: TokenInputs) -> Tensor:
    return values if tokens.weights is None else values * tokens.weights


def _ratio_sums(log_probs: Tensor, tokens: TokenInputs, ratio: Tensor) -> dict[str, Tensor]:
    """Return the sums and maxima of rho, and of the policy against ``old_log_probs``."""
    difference = (log_probs - tokens.old_log_probs).abs()
    return {
        "ratio": ratio.sum(),
        "max_ratio": _largest(ratio),
        "max_inverse_ratio": _largest(1.0 / ratio),
        "approx_kl": k3(tokens.old_log_probs, log_probs).sum(),
        "abs_log_ratio": difference.sum(),
        "max_abs_log_ratio": _largest(difference),
    }


def _largest(values: Tensor) -> Tensor:
    """Return the maximum of non-negative values; 0 when there are none."""
    return values.max() if values.numel() else values.new_zeros(())
