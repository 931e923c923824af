"""The sections of ``algorithm``: every switch of the report, and those beyond it, which are off by default.

RECIPE is docs/recipe.md, which says where each default is from; docs/recipe.md section 9 lists the switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from or1_megatron.config.base import AboveOne, NonNegativeFloat, PositiveFloat, Section
from or1_megatron.types import Aggregation


class AdvantageConfig(Section):
    """A = (r - mean) / (std + eps) over the group."""

    std_ddof: Literal[0, 1] = 1
    eps: NonNegativeFloat = 1e-6
    truncation_mask: Literal["none", "before", "after"] = "none"
    """RECIPE section 3. none: the recipe; before: truncated responses stay out of mean and std and get 0; after: they
    count in mean and std, then get 0."""
    reject_uniform_groups: bool = True
    """Groups whose advantages are all zero never enter the batch."""


class ClipHighConfig(Section):
    """Beyond the report (its open question 3): ``loss.clip_high`` follows the entropy target instead of standing still.

    epsilon_high rises by ``delta`` after a step with e_k below ``entropy.target`` and falls by it after one above.
    """

    delta: NonNegativeFloat = 0.0
    """0: off, ``loss.clip_high`` holds for the whole run. Otherwise that is where it starts."""
    minimum: NonNegativeFloat = 0.2
    maximum: PositiveFloat = 0.28


class LossConfig(Section):
    """Eq. 3.1 of the report, and how it is averaged (RECIPE section 1)."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: NonNegativeFloat = 0.2
    """clip-higher: above ``clip_low``."""
    clip_high_control: ClipHighConfig = ClipHighConfig()
    dual_clip: AboveOne | None = None
    """c: of a token with A < 0 the objective's term is at least c * A, however large the ratio. None: off."""
    aggregation: Aggregation = "token_mean"
    """token_mean: over all tokens of the mini-batch, the recipe; response_mean: over each response's tokens, then over
    responses (vanilla GRPO); micro_batch_mean: over each micro-batch's tokens, then over micro-batches, as the released
    code: what it gives depends on how the batch is cut into rows, that is, on the layout."""

    @model_validator(mode="after")
    def _steered_within_bounds(self) -> Self:
        control = self.clip_high_control
        if control.delta > 0 and not control.minimum <= self.clip_high <= control.maximum:
            raise ValueError(
                f"loss: clip_high = {self.clip_high:g}, where clip_high_control starts, is outside its [minimum, "
                f"maximum] = [{control.minimum:g}, {control.maximum:g}]"
            )
        return self


class KLConfig(Section):
    """KL penalty to a frozen reference, k3 estimator (RECIPE section 1). Off in every released model."""

    coefficient: NonNegativeFloat = 0.0
    """beta."""
    reference: Path | None = None
    """HF folder of the reference: the run's own start (``model.hf``), or the export of the stage before. It is scored
    once per rollout step; with beta 0 the KL is measured and weighs nothing. None: no reference is loaded."""

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        if self.coefficient > 0 and self.reference is None:
            raise ValueError(
                f"kl: coefficient = {self.coefficient:g} needs a policy to keep to; set algorithm.kl.reference to its "
                "HF folder (that of model.hf for the run's own start), or the coefficient to 0"
            )
        return self


class CorrectionConfig(Section):
    """Importance correction for the difference between engine's and policy's log-probs of the same weights.

    Each token's policy-gradient term is multiplied by w = pi_k / pi_engine, without gradient.
    """

    mode: Literal["off", "truncated", "masked"] = "off"
    """truncated: w is cut at ``cap``; masked: w is 0 outside [1 / cap, cap]."""
    cap: AboveOne = 2.0
    """C."""


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "paper": {
            "mode": "adaptive",
            "coefficient": 0.0,
            "target": 0.2,
            "delta": 0.005,
            "minimum": 0.0,
            "maximum": None,
            "estimate": "sampled",
            "measured_on": "all",
            "gate": "now",
        },
        "released-code": {
            "mode": "adaptive",
            "coefficient": 0.0,
            "target": 0.2,
            "delta": 0.0001,
            "minimum": 0.0,
            "maximum": 0.005,
            "estimate": "sampled",
            "measured_on": "kept",
            "gate": "late",
        },
    }
)
"""What ``entropy.preset`` stands for (RECIPE section 2)."""


class EntropyConfig(Section):
    """Entropy bonus, RECIPE section 2. Adaptive: alpha_k = c_k * 1{e_k <= target}, c moves by delta per step."""

    preset: Literal["paper", "released-code"] | None = None
    """All of mode, coefficient, target, delta, bounds, estimate, measured_on and gate at once (``PRESETS``)."""
    mode: Literal["off", "fixed", "adaptive", "proportional_integral"] = "adaptive"
    """proportional_integral is beyond the report: see ``rl.entropy.ProportionalIntegral``."""
    coefficient: NonNegativeFloat = 0.0
    """alpha when fixed; c_0 otherwise."""
    target: NonNegativeFloat = 0.2
    delta: NonNegativeFloat = 0.005
    minimum: NonNegativeFloat = 0.0
    maximum: PositiveFloat | None = None
    estimate: Literal["sampled", "full"] = "sampled"
    """Of e_k. sampled: from the log-probs of the sampled tokens, free; full: full-vocabulary entropy, from a forward
    pass over the rollout buffer before the update."""
    measured_on: Literal["all", "kept"] = "all"
    """e_k over all responses of the step, or, as the released code, over those that were not rejected."""
    gate: Literal["now", "late", "off"] = "now"
    """alpha_k is 0 where the entropy is above the target: e_k; that of the step before, as in the released code; or
    never."""
    bonus_on: Literal["all", "clipped"] = "all"
    """Beyond the report: the bonus over all tokens, or only over those whose ratio the clip has closed."""
    proportional_gain: NonNegativeFloat = 0.0
    integral_gain: NonNegativeFloat = 0.0
    """Of proportional_integral: alpha per nat of error, and what the integral gains per nat of error and step."""

    @model_validator(mode="before")
    @classmethod
    def _preset_and_nothing_else(cls, data: Any) -> Any:
        chosen = PRESETS.get(data.get("preset") or "") if isinstance(data, dict) else None
        if chosen is None:
            return data
        against = [f"{key} = {data[key]}" for key, value in chosen.items() if key in data and data[key] != value]
        if against:
            named = ", ".join(f"{key} = {value}" for key, value in chosen.items())
            raise ValueError(
                f"entropy: preset '{data['preset']}' stands for {named}; found also {', '.join(against)}. Drop one of "
                "the two (preset: null to set all by hand)"
            )
        return {**data, **chosen}

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        highest = float("inf") if self.maximum is None else self.maximum
        controlled = self.mode in ("adaptive", "proportional_integral")
        if self.minimum > highest:
            raise ValueError(f"entropy: minimum = {self.minimum} is above maximum = {self.maximum}")
        if controlled and not self.minimum <= self.coefficient <= highest:
            raise ValueError(
                f"entropy: coefficient (c_0) = {self.coefficient:g} is outside [minimum, maximum] = "
                f"[{self.minimum:g}, {highest:g}]"
            )
        return self

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        gains = self.proportional_gain, self.integral_gain
        if self.mode == "proportional_integral" and not any(gains):
            raise ValueError(
                "entropy: mode proportional_integral with both gains 0 never moves; set proportional_gain or "
                "integral_gain"
            )
        if self.mode == "adaptive" and self.delta == 0 and self.coefficient == 0:
            raise ValueError(
                "entropy: mode adaptive with delta = 0 and coefficient = 0 (c_0) never acts; set delta, or mode to off"
            )
        if self.mode != "proportional_integral" and any(gains):
            raise ValueError(
                f"entropy: proportional_gain = {gains[0]:g} and integral_gain = {gains[1]:g} belong to mode "
                f"proportional_integral; mode is {self.mode}"
            )
        if self.estimate == "full" and self.mode in ("off", "fixed"):
            raise ValueError(
                f"entropy: estimate full takes a forward pass per step, and mode {self.mode} makes no use of it; set "
                "estimate to sampled (the update reports the full entropy anyway), or mode to adaptive"
            )
        return self


class AlgorithmConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    entropy: EntropyConfig = EntropyConfig()
