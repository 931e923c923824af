"""DAPO: clip-higher, the token mean and a soft penalty on length (Yu et al. 2025, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from or1_megatron.config.algorithm import AlgorithmConfig
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss


@dataclass(frozen=True, slots=True)
class DAPO(ClippedPolicyLoss):
    """J = min(rho A, clip(rho, 1 - low, 1 + high) A) with high > low (eq. 8), and DAPO's other settings.

    The configuration must set clip-higher (0.2 and 0.28 in the paper) and the token mean, both in ``algorithm.loss``.
    It must also set the length penalty (``rl.penalties``). Dynamic sampling (``refill_prompts``) is optional.

    Worked example (low 0.2, high 0.28): rho 1.25, A 2 give J = 2.5, not clipped; a high of 0.2 would clip J to 2.4.
    rho 1.4, A 2 give J = 2.56, clipped. rho 0.7, A -1 give J = -0.8, clipped.
    """

    @classmethod
    def contradictions(cls, algorithm: AlgorithmConfig) -> Iterator[str]:
        wanted = "algorithm.objective.name = dapo"
        if algorithm.loss.aggregation != "token_mean":
            yield (
                f"{wanted} is a mean over tokens, but algorithm.loss.aggregation = {algorithm.loss.aggregation}; set "
                "it to token_mean"
            )
        if algorithm.loss.clip_high <= algorithm.loss.clip_low:
            yield (
                f"{wanted} clips higher, but algorithm.loss.clip_high = {algorithm.loss.clip_high:g} is not above "
                f"clip_low = {algorithm.loss.clip_low:g}; the paper has 0.28 and 0.2"
            )
        if algorithm.advantage.overlong_tokens is None:
            yield (
                f"{wanted} has a soft penalty on length, but algorithm.advantage.overlong_tokens is not set; the paper "
                "has 4096 of 20480 tokens"
            )
