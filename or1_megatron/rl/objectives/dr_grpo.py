"""Dr. GRPO: no division by the group's deviation, and a constant length (Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from or1_megatron.config.algorithm import AlgorithmConfig
from or1_megatron.interfaces import TokenInputs
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss


@dataclass(frozen=True, slots=True)
class DrGRPO(ClippedPolicyLoss):
    """The clipped loss, summed over all tokens of R responses and divided by R L, with advantages A = r - mean(r).

    L is the stage's ``max_response_tokens``. The policy divides every loss by the batch's T_k counted tokens, so the
    loss, with entropy bonus and KL, is multiplied by T_k / (R L) here. ``advantage.scale: none`` gives the advantages.

    Worked example: responses of 1 and 3 tokens with J = 2 and -1 at each token, L 8. The mean J is (2 - 3) / (2 * 8) =
    -1/16, so the loss is 1/16. The token mean (2 - 3) / 4 = -1/4, times T_k / (R L) = 4 / 16, is -1/16 too.
    """

    length_share: float = 1.0
    """T_k / (R L): the batch's mean response length, divided by L."""

    def __call__(
        self, log_probs: Tensor, entropies: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, sums = ClippedPolicyLoss.__call__(self, log_probs, entropies, tokens)
        scaled = {name: self.length_share * sums[name] for name in ("loss", "policy_loss")}
        return self.length_share * loss, {**sums, **scaled}

    @classmethod
    def contradictions(cls, algorithm: AlgorithmConfig) -> Iterator[str]:
        if algorithm.loss.aggregation != "token_mean":
            yield (
                f"algorithm.objective.name = dr_grpo divides by a constant length, but algorithm.loss.aggregation = "
                f"{algorithm.loss.aggregation} divides by the responses' own; set it to token_mean"
            )
        if algorithm.advantage.scale != "none":
            yield (
                "algorithm.objective.name = dr_grpo takes A = r - mean(r), but algorithm.advantage.scale = "
                f"{algorithm.advantage.scale} divides by the group's deviation; set it to none"
            )
