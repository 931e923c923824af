"""Entropy control: estimates the entropy e_k and adapts the bonus's coefficient (RECIPE section 2; report, 3.2.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from or1_megatron.config.algorithm import EntropyConfig
from or1_megatron.types import Group


def sampled_entropy(groups: Sequence[Group]) -> float:
    """Return e_k in nats per token (RECIPE section 2): minus the mean log-prob of the sampled tokens.

    The log-probs are the engines' (temperature applied, before top-p and top-k). The mean is over tokens, not over
    responses. Worked example: responses with log-probs (-1, -2, -3) and (-2) give e = 8 / 4 = 2.

    Raises ValueError when there is no token, or when a log-prob is not finite; the message then names the response.
    """
    completions = [completion for group in groups for completion in group.completions]
    totals = [float(completion.log_probs.sum(dtype=np.float64)) for completion in completions]
    for completion, total in zip(completions, totals, strict=True):
        if not np.isfinite(total):
            raise ValueError(
                f"problem {completion.problem_id}, sample {completion.sample_index}: engine {completion.engine} "
                f"gave a log-prob that is not finite"
            )
    tokens = sum(completion.log_probs.size for completion in completions)
    if tokens == 0:
        raise ValueError(f"sampled_entropy: the {len(groups)} groups hold no response token")
    return -sum(totals) / tokens


def estimate(groups: Sequence[Group], kept: Sequence[Group], config: EntropyConfig) -> tuple[float, float]:
    """Return (e_k, the sampled entropy of all responses of the step), both in nats per token (RECIPE section 2).

    e_k is measured on all ``groups``. With ``measured_on: kept`` it is measured on ``kept``, unless no group was kept.
    """
    of_all = sampled_entropy(groups)
    return (sampled_entropy(kept) if config.measured_on == "kept" and kept else of_all), of_all


@dataclass(frozen=True, slots=True)
class EntropyReading:
    """A step's entropy before its update, and the coefficient of the entropy bonus that follows from it."""

    entropy: float
    """The entropy e_k, measured as configured."""
    sampled: float
    """The sampled entropy of all responses of the step."""
    alpha: float
    """The entropy bonus's coefficient alpha_k."""
    controller: float
    """The controller's c_k."""


class EntropyController:
    """Sets the entropy bonus's coefficient alpha_k = c_k * gate; c_k moves by delta to bring e_k to the target.

    c_{k+1} = c_k + delta if e_k < target, c_k - delta if e_k > target, within [0, maximum] (report, section 3.2.5).

    ``advance`` is called once per rollout step; all SGD steps of a rollout step use one alpha_k. In mode ``adaptive``
    the gate is 1{e_k <= target}. With ``gate: late`` it is 1{e_{k-1} <= target}, and 1 in the first step, as in the
    released code. With ``gate: off`` it is always 1. In mode ``fixed`` c_k is constant and the gate is 1; in mode
    ``off`` the gate is 0.

    Worked example (adaptive, target 0.2, delta 0.005, c_0 = 0): e = 0.1, 0.1, 0.3, 0.1 gives c = 0, 0.005, 0.01, 0.005
    and alpha = 0, 0.005, 0, 0.005; with the late gate alpha = 0, 0.005, 0.01, 0; without gate alpha = c.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._highest = float("inf") if config.maximum is None else config.maximum
        self.coefficient = config.coefficient
        """The controller's c_k."""
        self._before: float | None = None
        """The entropy e_{k-1} of the previous step."""

    def alpha(self, entropy: float) -> float:
        """Return alpha_k for e_k = ``entropy``."""
        return self.coefficient if self._open(entropy) else 0.0

    def _open(self, entropy: float) -> bool:
        if self._config.mode != "adaptive" or self._config.gate == "off":
            return self._config.mode != "off"
        seen = entropy if self._config.gate == "now" else self._before
        return seen is None or seen <= self._config.target

    def advance(self, entropy: float) -> None:
        """Move c_k to c_{k+1} after a step with this ``entropy``. If ``entropy`` equals the target, c_k stays."""
        target = self._config.target
        if self._config.mode == "adaptive" and entropy != target:
            moved = self.coefficient + (self._config.delta if entropy < target else -self._config.delta)
            self.coefficient = min(max(moved, 0.0), self._highest)
        self._before = entropy

    def state(self) -> dict[str, Any]:
        """Return c_k and e_{k-1} for a checkpoint, JSON-able. Python's JSON keeps floats exactly."""
        return {"coefficient": self.coefficient, "before": self._before}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state()`` returned. Modes other than ``adaptive`` keep the configured coefficient."""
        if self._config.mode == "adaptive":
            self.coefficient, self._before = float(state["coefficient"]), state.get("before")
