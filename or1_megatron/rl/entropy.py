"""Entropy control: the estimate of e_k and the controllers that it drives (RECIPE section 2; report, section 3.2.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from or1_megatron.config.algorithm import EntropyConfig, LossConfig
from or1_megatron.types import Float32Array, Group


def sampled_entropy(groups: Sequence[Group]) -> float:
    """Return e_k in nats per token (RECIPE section 2, ``sampled``): minus the mean log-prob of the sampled tokens.

    The log-probs are the engines' (temperature applied, before top-p and top-k). The mean is over tokens, not over
    responses. Worked example: responses with log-probs (-1, -2, -3) and (-2): e = 8 / 4 = 2.

    Raises ValueError when a log-prob is not finite (naming the response) or when there is no token at all.
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


def full_entropy(entropies: Sequence[Float32Array]) -> float:
    """Return e_k by the option ``full`` (RECIPE section 2): the mean over all tokens of ``entropies`` [n per response].

    Worked example: (1, 2, 3) and (2): 8 / 4 = 2. Raises ValueError when one is not finite or there is no token at all.
    """
    tokens = sum(values.size for values in entropies)
    total = sum(float(values.sum(dtype=np.float64)) for values in entropies)
    if tokens == 0 or not np.isfinite(total):
        raise ValueError(f"full_entropy: the sum over {tokens} response tokens is {total:g}; expected a finite one")
    return total / tokens


def estimate(
    groups: Sequence[Group], kept: Sequence[Group], full: Sequence[Float32Array] | None, config: EntropyConfig
) -> tuple[float, float]:
    """Return (e_k as configured, the sampled entropy of all responses of the step), nats per token (RECIPE section 2).

    Args:
        kept: the ``groups`` that were not rejected. When there are none, e_k is measured on all groups.
        full: full-vocabulary entropies of the responses that e_k is measured on, where ``estimate`` is full.
    """
    of_all = sampled_entropy(groups)
    if full is not None:
        return full_entropy(full), of_all
    return (sampled_entropy(kept) if config.measured_on == "kept" and kept else of_all), of_all


@dataclass(frozen=True, slots=True)
class EntropyReading:
    """A step's entropy before its update, and the coefficients that follow from it."""

    entropy: float
    """e_k."""
    sampled: float
    """The estimate ``sampled`` over all responses of the step."""
    alpha: float
    """alpha_k."""
    controller: float
    """c_k; the integral of a proportional-integral controller."""
    clip_high: float
    """epsilon_high of this step's updates."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The report's rule (section 3.2.5): alpha_k = c_k; c_{k+1} = c_k + delta if e_k < target, c_k - delta if above.

    With delta 0 the coefficient is fixed.
    """

    target: float
    delta: float

    def alpha(self, coefficient: float, entropy: float) -> float:
        """Return alpha_k for e_k = ``entropy``, before the gate."""
        return coefficient

    def advance(self, coefficient: float, entropy: float) -> float:
        """Return c_{k+1}, before it is cut to its bounds."""
        return coefficient + self.delta * (int(entropy < self.target) - int(entropy > self.target))


@dataclass(frozen=True, slots=True)
class ProportionalIntegral:
    """Beyond the report: alpha_k = K_p err_k + c_k, cut to [lowest, highest]; c_{k+1} = c_k + K_i err_k.

    err_k = target - e_k. This is the textbook discrete PI controller, with anti-windup by conditional integration: c
    rests while alpha_k is at a bound and the error pushes it further out. Otherwise c would drift away during a long
    spell of high entropy, and take as long to come back.

    Worked example (target 0.2, K_p 0.1, K_i 0.05, bounds [0, 0.02], c_0 = 0.01):
        e 0.1: alpha 0.01 + 0.01 = 0.02, at the bound and pushing: c stays 0.01
        e 0.18: alpha 0.01 + 0.002 = 0.012, c = 0.01 + 0.001 = 0.011
        e 0.4: alpha -0.009, cut to 0, pushing: c stays 0.011
    """

    target: float
    proportional: float
    integral: float
    lowest: float
    highest: float

    def alpha(self, coefficient: float, entropy: float) -> float:
        wanted = self.proportional * (self.target - entropy) + coefficient
        return min(max(wanted, self.lowest), self.highest)

    def advance(self, coefficient: float, entropy: float) -> float:
        error = self.target - entropy
        wanted = self.proportional * error + coefficient
        pushes = (wanted >= self.highest and error > 0) or (wanted <= self.lowest and error < 0)
        return coefficient if pushes else coefficient + self.integral * error


class EntropyController:
    """alpha_k = rule's alpha * gate; c_{k+1} = rule's next c, within [minimum, maximum]. RECIPE section 2.

    ``advance`` is called once per rollout step; alpha_k is the same for all SGD steps of that step. In mode
    ``adaptive`` the gate is 1{e_k <= target}, or 1{e_{k-1} <= target} (``late``, as in the released code; open in the
    first step), or always 1. In mode ``off`` it is 0, in the others 1.

    Worked example (adaptive, target 0.2, delta 0.005, c_0 = 0): e = 0.1, 0.1, 0.3, 0.1 gives c = 0, 0.005, 0.01, 0.005
    and alpha = 0, 0.005, 0, 0.005; with the late gate alpha = 0, 0.005, 0.01, 0; without gate alpha = c.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._highest = float("inf") if config.maximum is None else config.maximum
        self._rule = _rule(config, self._highest)
        self.coefficient = config.coefficient
        """c_k."""
        self._before: float | None = None
        """e_{k-1}."""

    def alpha(self, entropy: float) -> float:
        """Return alpha_k for e_k = ``entropy``."""
        return self._rule.alpha(self.coefficient, entropy) if self._open(entropy) else 0.0

    def _open(self, entropy: float) -> bool:
        if self._config.mode != "adaptive" or self._config.gate == "off":
            return self._config.mode != "off"
        seen = entropy if self._config.gate == "now" else self._before
        return seen is None or seen <= self._config.target

    def advance(self, entropy: float) -> None:
        """Move c_k to c_{k+1} after a step whose entropy was ``entropy``. At the target c rests."""
        moved = self._rule.advance(self.coefficient, entropy)
        if moved != self.coefficient:
            self.coefficient = min(max(moved, self._config.minimum), self._highest)
        self._before = entropy

    def state(self) -> dict[str, Any]:
        """JSON-able; Python writes floats so that they read back exactly."""
        return {"coefficient": self.coefficient, "before": self._before}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned. A mode whose coefficient does not move keeps the configured one."""
        if self._config.mode in ("adaptive", "proportional_integral"):
            self.coefficient, self._before = float(state["coefficient"]), state.get("before")


def _rule(config: EntropyConfig, highest: float) -> Steps | ProportionalIntegral:
    if config.mode == "proportional_integral":
        gains = config.proportional_gain, config.integral_gain
        return ProportionalIntegral(config.target, *gains, config.minimum, highest)
    return Steps(config.target, config.delta if config.mode == "adaptive" else 0.0)


class ClipHighController:
    """Beyond the report (open question 3): epsilon_high rises by delta after e_k < target, falls by it after e_k above.

    A wider upper clip lets unlikely tokens gain more, which raises entropy (the report, ablation 10). The rule is
    ``Steps``, within [minimum, maximum]; with delta 0 it stays at ``loss.clip_high``.

    Worked example (start 0.2, target 0.2, delta 0.02, bounds [0.2, 0.23]): e = 0.1, 0.1, 0.3 gives 0.2, 0.22, 0.23 and
    then 0.21.
    """

    def __init__(self, config: LossConfig, target: float) -> None:
        self._config, self._target = config.clip_high_control, target
        self.value = config.clip_high
        """epsilon_high of the next step."""

    def advance(self, entropy: float) -> None:
        config = self._config
        if config.delta > 0:
            moved = Steps(self._target, config.delta).advance(self.value, entropy)
            self.value = min(max(moved, config.minimum), config.maximum)

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned; with delta 0 the configured value stays."""
        if self._config.delta > 0:
            self.value = float(state["value"])
