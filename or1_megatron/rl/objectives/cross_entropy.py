"""Supervised loss on the path of the policy gradient; the quickstart makes its base model with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from or1_megatron.interfaces import TokenInputs
from or1_megatron.rl.objectives.estimators import weighted


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Supervised loss on the same path: - sum_t omega_t log pi_theta(target_t)."""

    temperature: float = 1.0

    def __call__(
        self, log_probs: Tensor, entropies: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return (loss, sums ``loss`` and ``entropy``)."""
        loss = -weighted(log_probs, tokens.weights).sum()
        return loss, {"loss": loss.detach(), "entropy": entropies.detach().sum()}
