"""The policy-gradient loss that all objectives share: importance correction, KL penalty, entropy bonus, reported sums.

Shapes: all tensors are [N] for N counted tokens, where N may be 0. They are fp32, or float64 when the loss is evaluated
before the update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from or1_megatron.config.algorithm import AlgorithmConfig, CorrectionLevel, KLEstimator
from or1_megatron.interfaces import Scope, TokenInputs
from or1_megatron.rl.objectives.estimators import correction_weights, k3, kl_estimate, largest, weighted


@dataclass(frozen=True, slots=True)
class Surrogate:
    """An objective's own term J, which is maximised. All tensors are [N], except ``sums``."""

    values: Tensor
    """J of each token, with gradient."""
    ratio: Tensor
    """The importance ratio rho of the token or of its sequence."""
    clipped: Tensor
    """bool: whether a clip of the ratio took effect at the token."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Further sums over tokens, which the loss reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientLoss(ABC):
    """The loss that all objectives in this folder share; a subclass defines J (``surrogate``):

        sum_t omega_t { - w_t J_t - alpha H_t + beta kl(pi_theta || pi_ref)_t }

    omega: token weights of the aggregation (``rl.aggregation``), 1 for the recipe's token mean. w: importance weights
    (``correction_weights``). kl: ``kl_estimate``. H: the token's entropy.

    ``on_policy`` (N_SGD = 1): pi_k, the policy at the step's start, is pi_theta. The ratio
    rho = exp(log pi_theta - stop_gradient(log pi_theta)) is then 1 everywhere, and its gradient is the gradient of log
    pi_theta. The engine's log-probs then serve only to measure the mismatch of engine and policy, and to compute w.
    """

    own_scope: ClassVar[Scope] = "token"
    """What a token's J depends on."""

    entropy_coefficient: float
    """alpha_k. At 0 the entropies get no gradient."""
    temperature: float
    on_policy: bool
    kl_coefficient: float = 0.0
    """beta. At 0 the KL to the reference is measured but not part of the loss."""
    kl_estimator: KLEstimator = "k3"
    kl_cap: float | None = None
    correction: Literal["off", "truncated", "masked"] = "off"
    correction_cap: float = 2.0
    correction_floor: float | None = None
    correction_level: CorrectionLevel = "token"

    @abstractmethod
    def surrogate(self, log_probs: Tensor, old: Tensor, tokens: TokenInputs) -> Surrogate:
        """Return J, its ratio and its clips. ``log_probs``: log pi_theta [N]. ``old``: log pi_old [N], a constant."""

    @classmethod
    def contradictions(cls, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Yield the reasons why ``algorithm`` does not suit this objective, if there are any."""
        return iter(())

    @property
    def scope(self) -> Scope:
        """Return what a token's loss term depends on: ``own_scope``, or "sequence" if importance weights need it."""
        by_sequence = self.correction != "off" and self.correction_level != "token"
        return "sequence" if by_sequence and self.own_scope == "token" else self.own_scope

    def __call__(
        self, log_probs: Tensor, entropies: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return (loss, sums), summed over the tokens; sums have no gradient.

        Sums weighted by omega: ``loss``, ``policy_loss`` (the loss without entropy bonus). Plain sums: ``entropy``,
        ``ratio``, ``clipped`` = ``clipped_low`` + ``clipped_high``, ``abs_log_ratio`` (|log pi_theta - log pi_old|) and
        ``approx_kl``, the k3 estimator of KL(pi_old || pi_theta); on policy, pi_old is the engine. Maxima:
        ``max_ratio``, ``max_inverse_ratio``, ``max_abs_log_ratio``. With a reference: ``kl``. With a correction:
        ``weight``, ``weight_square``, ``max_weight``, ``weight_cut``. A subclass may add sums.
        """
        old = (log_probs if self.on_policy else tokens.old_log_probs).detach()
        own = self.surrogate(log_probs, old, tokens)
        values, sums = own.values, dict(own.sums)
        if self.correction != "off":
            weights, of_weights = self._correction(old, tokens)
            values, sums = weights * values, sums | of_weights
        per_token = -values
        if tokens.reference_log_probs is not None:
            kl = kl_estimate(log_probs, tokens.reference_log_probs, self.kl_estimator, self.kl_cap)
            sums["kl"] = kl.detach().sum()
            if self.kl_coefficient != 0.0:
                per_token = per_token + self.kl_coefficient * kl
        policy_loss = weighted(per_token, tokens.weights).sum()
        loss = policy_loss
        if self.entropy_coefficient != 0.0:
            loss = policy_loss - self.entropy_coefficient * weighted(entropies, tokens.weights).sum()
        sums |= {"loss": loss.detach(), "policy_loss": policy_loss.detach(), "entropy": entropies.detach().sum()}
        return loss, sums | _ratio_sums(log_probs.detach(), tokens, own)

    def _correction(self, old: Tensor, tokens: TokenInputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.correction != "off"
        if tokens.engine_log_probs is None:
            raise ValueError("the importance correction needs the engine's log-probs; TokenInputs has none")
        weights, cut = correction_weights(
            old,
            tokens.engine_log_probs,
            self.correction,
            self.correction_cap,
            self.correction_level,
            tokens.sequences,
            self.correction_floor,
        )
        return weights, {
            "weight": weights.sum(),
            "weight_square": weights.square().sum(),
            "max_weight": largest(weights),
            "weight_cut": cut.sum(dtype=weights.dtype),
        }


@torch.no_grad()
def _ratio_sums(log_probs: Tensor, tokens: TokenInputs, own: Surrogate) -> dict[str, Tensor]:
    """Return sums and maxima of rho, the clips, and the distance of ``log_probs`` from ``tokens.old_log_probs``."""
    ratio, clipped = own.ratio.detach(), own.clipped
    above = ratio > 1.0
    difference = (log_probs - tokens.old_log_probs).abs()
    return {
        "ratio": ratio.sum(),
        "max_ratio": largest(ratio),
        "max_inverse_ratio": largest(1.0 / ratio),
        "clipped": clipped.sum(dtype=ratio.dtype),
        "clipped_low": (clipped & ~above).sum(dtype=ratio.dtype),
        "clipped_high": (clipped & above).sum(dtype=ratio.dtype),
        "approx_kl": k3(tokens.old_log_probs, log_probs).sum(),
        "abs_log_ratio": difference.sum(),
        "max_abs_log_ratio": largest(difference),
    }


def old_is_the_policy(algorithm: AlgorithmConfig, stale: bool) -> bool:
    """Return whether rho's denominator is pi_k, the policy at the step's start, rather than the engines' policy.

    Both have the same weights unless older weights drew samples (``stale``). With ``stale`` samples and no correction,
    rho's denominator is the engines' policy, as in PPO. With a correction, w = pi_k / pi_engine corrects for the older
    weights, and rho = pi_theta / pi_k: the decoupled objective of Hilton et al. 2021, arXiv 2110.00641.
    """
    return not stale or algorithm.correction.mode != "off"
