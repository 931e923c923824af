"""Entropy control: how e_k is measured, and what follows from it (RECIPE section 2; section 3.2.5 of the report)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from or1_megatron.config.algorithm import EntropyConfig, LossConfig
from or1_megatron.types import Float32Array, Group


def sampled_entropy(groups: Sequence[Group]) -> float:
    """e_k in nats per token (RECIPE section 2, ``sampled``): minus the mean log-prob of the sampled tokens, over *all*
    responses of the step.

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


def full_entropy(entropies: Sequence[Float32Array]) -> float:
    """e_k by the option ``full`` (RECIPE section 2): mean over all tokens of their full-vocabulary entropies [n per
    response], nats.

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
    """(e_k as configured, the sampled entropy of all responses of the step), nats per token (RECIPE section 2).

    Args:
        kept: those of ``groups`` that were not rejected; where there are none, ``measured_on`` kept means all.
        full: full-vocabulary entropies of the responses that e_k is measured on, where ``estimate`` is full.
    """
    of_all = sampled_entropy(groups)
    if full is not None:
        return full_entropy(full), of_all
    return (sampled_entropy(kept) if config.measured_on == "kept" and kept else of_all), of_all


@dataclass(frozen=True, slots=True)
class EntropyReading:
    """What one step knows of its entropy before the update, and the coefficients that follow from it."""

    entropy: float
    """e_k."""
    sampled: float
    """By the estimate ``sampled``, over all responses of the step."""
    alpha: float
    """alpha_k."""
    controller: float
    """c_k; the integral of a proportional-integral controller."""
    clip_high: float
    """epsilon_high of this step's updates."""


class CoefficientRule(Protocol):
    """How alpha_k follows from e_k and a coefficient that the controller remembers."""

    def alpha(self, coefficient: float, entropy: float) -> float:
        """alpha_k for e_k = ``entropy``; 0 where the gate says so is not the rule's business."""
        ...

    def advance(self, coefficient: float, entropy: float) -> float:
        """The coefficient for the step after one with this entropy, before it is cut to its bounds."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """``off`` and ``fixed``."""

    value: float

    def alpha(self, coefficient: float, entropy: float) -> float:
        return self.value

    def advance(self, coefficient: float, entropy: float) -> float:
        return coefficient


@dataclass(frozen=True, slots=True)
class Steps:
    """The report's rule (section 3.2.5): alpha_k = c_k; c_{k+1} = c_k + delta if e_k < target, c_k - delta if above."""

    target: float
    delta: float

    def alpha(self, coefficient: float, entropy: float) -> float:
        return coefficient

    def advance(self, coefficient: float, entropy: float) -> float:
        return coefficient + self.delta * (int(entropy < self.target) - int(entropy > self.target))


@dataclass(frozen=True, slots=True)
class ProportionalIntegral:
    """Beyond the report: alpha_k = K_p err_k + c_k, cut to [lowest, highest]; c_{k+1} = c_k + K_i err_k.

    err_k = target - e_k. The textbook discrete PI controller. Anti-windup by conditional integration: while alpha_k
    lies at a bound and the error pushes it further out, c stands still; or a long spell of high entropy would have to
    be unlearnt first.

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

    One ``advance`` per rollout step; alpha_k is fixed across that step's SGD steps. The gate is 1{e_k <= target}, or
    with e_{k-1} (``late``, as the released code; open before the first step), or always open. Only the report's rule
    has one: a fixed coefficient is fixed, and a proportional-integral controller closes by itself.

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
        """alpha_k for e_k = ``entropy``."""
        return self._rule.alpha(self.coefficient, entropy) if self._open(entropy) else 0.0

    def _open(self, entropy: float) -> bool:
        if self._config.mode != "adaptive" or self._config.gate == "off":
            return True
        seen = entropy if self._config.gate == "now" else self._before
        return seen is None or seen <= self._config.target

    def advance(self, entropy: float) -> None:
        """c_k -> c_{k+1} after a step whose entropy was ``entropy``. At the target c rests."""
        moved = self._rule.advance(self.coefficient, entropy)
        if moved != self.coefficient:
            self.coefficient = min(max(moved, self._config.minimum), self._highest)
        self._before = entropy

    def state(self) -> dict[str, Any]:
        """JSON-able; Python writes floats so that they read back exactly."""
        return {"coefficient": self.coefficient, "before": self._before}

    def restore(self, state: Mapping[str, Any]) -> None:
        """A controller that moves goes on where it was. Otherwise the configuration rules, and the state is left."""
        if self._config.mode in ("adaptive", "proportional_integral"):
            self.coefficient, self._before = float(state["coefficient"]), state.get("before")


def _rule(config: EntropyConfig, highest: float) -> CoefficientRule:
    if config.mode == "adaptive":
        return Steps(config.target, config.delta)
    if config.mode == "proportional_integral":
        gains = config.proportional_gain, config.integral_gain
        return ProportionalIntegral(config.target, *gains, config.minimum, highest)
    return Constant(config.coefficient if config.mode == "fixed" else 0.0)


class ClipHighController:
    """Beyond the report (open question 3): epsilon_high rises by delta after e_k < target, falls by it after e_k above.

    A wider upper clip lets unlikely tokens gain more, and entropy rises (the report, ablation 10): the same thermostat
    as ``Steps``, on another knob. It stays within [minimum, maximum]; delta 0: ``loss.clip_high`` for good.

    Worked example (start 0.2, target 0.2, delta 0.02, bounds [0.2, 0.23]): e = 0.1, 0.1, 0.3 gives 0.2, 0.22, 0.23 and
    then 0.21.
    """

    def __init__(self, config: LossConfig, target: float) -> None:
        self._config, self._target = config.clip_high_control, target
        self.value = config.clip_high
        """epsilon_high of the step to come."""

    def advance(self, entropy: float) -> None:
        config = self._config
        if config.delta > 0:
            moved = Steps(self._target, config.delta).advance(self.value, entropy)
            self.value = min(max(moved, config.minimum), config.maximum)

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Where it moves, it goes on where it was; otherwise the configuration rules."""
        if self._config.delta > 0:
            self.value = float(state["value"])
