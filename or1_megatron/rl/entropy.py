"""Adaptive entropy control (RECIPE section 2; section 3.2.5 of the report)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from or1_megatron.config import EntropyConfig
from or1_megatron.types import Group


def sampled_entropy(groups: Sequence[Group]) -> float:
    """e_k in nats per token: minus the mean log-prob of the sampled tokens, over *all* responses of the step.

    Rejected groups count too: their entropy is the policy's as much as any other's. The log-probs are the engines'
    (temperature applied, before top-p and top-k). Mean over tokens, not over responses. Worked example: responses with
    log-probs (-1, -2, -3) and (-2): e = 8 / 4 = 2.

    Raises ValueError when a log-prob is not finite (naming the response) or when there is no token at all.
    """
    total, tokens = 0.0, 0
    for group in groups:
        for completion in group.completions:
            of_response = float(completion.log_probs.sum(dtype=np.float64))
            if not np.isfinite(of_response):
                raise ValueError(
                    f"problem {completion.problem_id}, sample {completion.sample_index}: engine {completion.engine} "
                    f"gave a log-prob that is not finite"
                )
            total += of_response
            tokens += completion.log_probs.size
    if tokens == 0:
        raise ValueError(f"sampled_entropy: the {len(groups)} groups hold no response token")
    return -total / tokens


@dataclass(frozen=True, slots=True)
class EntropyReading:
    """What one step knows of its entropy before the update, and the coefficient that follows from it."""

    entropy: float
    """e_k."""
    alpha: float
    """alpha_k."""
    controller: float
    """c_k."""


class EntropyController:
    """alpha_k = c_k * 1{e_k <= target}; c_{k+1} = c_k + delta if e_k < target, c_k - delta if e_k > target.

    c stays within [minimum, maximum]. One ``advance`` per rollout step; alpha_k is fixed across that step's SGD steps.
    Modes: ``off``: alpha is 0; ``fixed``: alpha is the configured coefficient, whatever e_k is; ``adaptive``: the rule.

    Worked example (target 0.2, delta 0.005, c_0 = 0): e = 0.1, 0.1, 0.3, 0.1 gives c = 0, 0.005, 0.01, 0.005 and
    alpha = 0, 0.005, 0, 0.005.
    """

    def __init__(self, config: EntropyConfig) -> None:
        """Raises ValueError when c_0 lies outside [minimum, maximum]."""
        self._config = config
        self._highest = float("inf") if config.maximum is None else config.maximum
        self.coefficient = config.coefficient
        """c_k."""

    def alpha(self, entropy: float) -> float:
        """alpha_k for e_k = ``entropy``."""
        if self._config.mode == "off":
            return 0.0
        if self._config.mode == "fixed":
            return self.coefficient
        return self.coefficient if entropy <= self._config.target else 0.0

    def read(self, groups: Sequence[Group]) -> EntropyReading:
        """e_k, alpha_k and c_k of a step whose rollout buffer is ``groups``; changes nothing."""
        entropy = sampled_entropy(groups)
        return EntropyReading(entropy, self.alpha(entropy), self.coefficient)

    def advance(self, entropy: float) -> None:
        """c_k -> c_{k+1} after a step whose entropy was ``entropy``; only when adaptive. At the target c rests."""
        if self._config.mode != "adaptive":
            return
        move = self._config.delta * (int(entropy < self._config.target) - int(entropy > self._config.target))
        self.coefficient = min(max(self.coefficient + move, self._config.minimum), self._highest)

    def state(self) -> dict[str, Any]:
        """JSON-able; Python writes floats so that they read back exactly."""
        return {"coefficient": self.coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Adaptive: c goes on where it was. Otherwise the configuration rules, and the state is left aside."""
        if self._config.mode == "adaptive":
            self.coefficient = float(state["coefficient"])
