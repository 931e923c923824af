"""The configuration section ``algorithm``: objective, advantages, loss, KL, importance correction, entropy bonus.

Switches beyond the report are off by default. docs/recipe.md says where each default comes from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from or1_megatron.config.base import AboveOne, NonNegativeFloat, Positive, PositiveFloat, Section, refuse_idle
from or1_megatron.types import Aggregation

KLEstimator = Literal["k2", "k3"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


class ObjectiveConfig(Section):
    """The training objective (docs/objectives.md). docs/changing_the_objective.md shows how to add an objective."""

    name: str = "clipped"
    """clipped, gspo, cispo, dr_grpo, dapo, or package.module:Name of a dataclass of your own. Recipe: clipped in the
    paper (eq. 3.1) and every released model."""
    args: dict[str, float | int | bool | str | None] = Field(default_factory=dict)
    """Parameters of your own objective, by name, in addition to those that ``loss``, ``kl``, ``correction`` and
    ``entropy`` set. Unit: that of the parameter."""


class AdvantageConfig(Section):
    """Advantages: A = (r - mean) / (std + eps) over the group."""

    std_ddof: Literal[0, 1] = 1
    """1: the unbiased standard deviation; 0: the population's. Unit: none. Recipe: 1 in the released code
    (docs/recipe.md, section 1)."""
    eps: NonNegativeFloat = 1e-6
    """eps of A, which is added to the standard deviation. Unit: reward. Recipe: 1e-6 in the released code
    (docs/recipe.md, section 1)."""
    scale: Literal["std", "none"] = "std"
    """Divisor of r - mean. std: the standard deviation plus ``eps``; none: 1, as in Dr. GRPO. Recipe: std in the paper
    and every released model (docs/recipe.md, section 1)."""
    overlong_tokens: Positive | None = None
    """L_cache of DAPO's soft penalty on length (docs/objectives.md): over the last L_cache tokens before the stage's
    max_response_tokens, the penalty grows linearly from 0 to ``overlong_penalty``. Unset: no penalty. Unit: tokens.
    Recipe: none in any released model."""
    overlong_penalty: PositiveFloat = 0.5
    """Penalty of a response of max_response_tokens, subtracted from its reward; needs ``overlong_tokens``. 0.5
    corresponds to DAPO's 1, because our rewards are 0 and 1, and DAPO's are -1 and 1. Unit: reward."""
    truncation_mask: Literal["none", "before", "after"] = "none"
    """Advantages of truncated responses. none: computed as for any response; before: 0, and their rewards do not count
    in mean and std; after: 0, but their rewards count in mean and std. Recipe: none in every released model
    (docs/recipe.md, sections 3 and 4); ablation 3 compares the three."""
    reject_uniform_groups: bool = True
    """Leave out of the batch each group with equal rewards, or with advantages that are all zero. Recipe: on in every
    released model (docs/recipe.md, sections 1 and 4)."""

    @model_validator(mode="after")
    def _penalises_what_counts(self) -> Self:
        if self.overlong_tokens is not None and self.truncation_mask != "none":
            raise ValueError(
                f"advantage: overlong_tokens = {self.overlong_tokens} penalises long responses, but truncation_mask = "
                f"{self.truncation_mask} gives truncated ones advantage 0; set truncation_mask to none"
            )
        if self.scale == "none":
            refuse_idle(self, "advantage", ("std_ddof", "eps"), "with scale = none; set scale to std")
        if self.overlong_tokens is None:
            refuse_idle(self, "advantage", ("overlong_penalty",), "without overlong_tokens; set it")
        return self


class LossConfig(Section):
    """Clipping of the importance ratio, and how the token losses of a mini-batch are averaged."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """epsilon_low: the ratio is clipped below at 1 - epsilon_low. Unit: none. Recipe: 0.2 in every released model
    (docs/recipe.md, sections 1 and 4)."""
    clip_high: NonNegativeFloat = 0.2
    """epsilon_high: the ratio is clipped above at 1 + epsilon_high; a value above ``clip_low`` is clip-higher. Unit:
    none. Recipe: 0.2 in every released model; ablation 10 has 0.25, 0.265 and 0.28 (docs/recipe.md, sections 4, 5)."""
    dual_clip: AboveOne | None = None
    """c of dual clipping: for a token with A < 0 the objective is at least c * A, however large the ratio. Unset: no
    dual clipping. Unit: none."""
    aggregation: Aggregation = "token_mean"
    """token_mean: the mean over all tokens of the mini-batch; response_mean: the mean over each response's tokens, then
    over responses (vanilla GRPO); released-code: the mean over the tokens of each micro-batch, cut as the released code
    does, then over micro-batches, each weighted by its number of responses. The parallel layout changes no result.
    Recipe: token_mean in the paper's eq. 3.1; the released code averages per micro-batch (docs/recipe.md, 1 and 9)."""


class KLConfig(Section):
    """Penalty on the KL divergence of the policy from a frozen reference model."""

    coefficient: NonNegativeFloat = 0.0
    """beta, the factor of the KL in the loss. Unit: none. Recipe: no KL in any released model; ablation 5 compares 1e-3
    (docs/recipe.md, sections 4 and 5)."""
    reference: Path | None = None
    """HF folder of the reference model, such as ``model.hf`` (the run's start) or the previous stage's export. The
    reference's log-probs are computed once per rollout step. With beta 0, the KL is only reported. Unset: none."""

    estimator: KLEstimator = "k3"
    """How KL(policy || reference) is estimated from a sampled token (docs/objectives.md). The mean of k2's gradient is
    the gradient of the KL. Recipe: k3."""
    cap: PositiveFloat | None = None
    """Largest KL estimate of a token: a larger one is cut to the cap and has no gradient. Unset: no cap. Unit: nats.
    Recipe: the released code cuts at 10; the paper names no cap."""

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        if self.coefficient > 0 and self.reference is None:
            raise ValueError(
                f"kl: coefficient = {self.coefficient:g} needs a policy to keep to; set algorithm.kl.reference to its "
                "HF folder (that of model.hf for the run's own start), or the coefficient to 0"
            )
        return self


class CorrectionConfig(Section):
    """Importance correction for the difference between the engine's and the policy's log-probs (not in the report).

    Each token's policy-gradient term is multiplied by w = pi_k / pi_engine, without gradient.
    """

    mode: Literal["off", "truncated", "masked"] = "off"
    """The weight w of a token. off: 1; truncated: w is cut at ``cap``; masked: w is 0 outside [``floor``, ``cap``]."""
    level: CorrectionLevel = "token"
    """token: each token's w is the token's own ratio; sequence: all tokens of a response have the product of their
    ratios as w; geometric: all tokens of a response have the geometric mean of their ratios as w."""
    cap: AboveOne = 2.0
    """C, the upper bound of a token's weight w. Unit: none."""
    floor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """With mode masked: the lowest w that is kept. IcePop uses 0.5, with a cap of 5. Unset: 1 / cap. Unit: none."""

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.mode == "off":
            refuse_idle(self, "correction", ("level", "cap"), "with mode = off; set mode to truncated or masked")
        if self.mode != "masked":
            refuse_idle(self, "correction", ("floor",), f"with mode = {self.mode}; set mode to masked")
        return self


class EntropyConfig(Section):
    """Entropy bonus alpha_k * H. With mode adaptive, alpha_k = c_k * 1{e_k <= target}; c moves by delta per step."""

    mode: Literal["off", "fixed", "adaptive"] = "adaptive"
    """fixed: alpha_k = coefficient; adaptive: alpha_k = c_k if e_k <= target, else 0. Recipe: adaptive in the paper
    (section 3.2.5) and every released model."""
    coefficient: NonNegativeFloat = 0.0
    """With mode fixed: alpha; with mode adaptive: c_0. Unit: none. Recipe: c_0 = 0 (paper, section 3.2.5); ablation 8
    compares fixed values from 1e-4 to 1e-2."""
    target: NonNegativeFloat = 0.2
    """Entropy above which the bonus is off. Unit: nats per token. Recipe: 0.2 in the paper (section 3.2.5) and every
    released model."""
    delta: NonNegativeFloat = 0.005
    """Change of c per rollout step. Unit: none. Recipe: 0.005 in the paper (section 3.2.5), 0.0001 in released code."""
    maximum: PositiveFloat | None = None
    """Upper bound of c; the lower bound is 0. Unset: no upper bound. Unit: none. Recipe: the paper names none; 0.005 in
    the released scripts (docs/recipe.md, section 2)."""
    measured_on: Literal["all", "kept"] = "all"
    """Responses on which the entropy e_k is measured, from the log-probs of sampled tokens. all: all responses of the
    step; kept: the responses of groups that were not rejected. Recipe: the released code measures after rejection
    (docs/recipe.md, section 2)."""
    gate: Literal["now", "late", "off"] = "now"
    """The entropy that is compared with the target, to turn the bonus off above it. now: e_k; late: e_{k-1}; off: there
    is no comparison, and the bonus is always on. Recipe: now in the paper (section 3.2.5); the released code is one
    step late (docs/recipe.md, section 2)."""

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if self.mode == "adaptive" and self.maximum is not None and self.coefficient > self.maximum:
            raise ValueError(
                f"entropy: coefficient (c_0) = {self.coefficient:g} is above maximum = {self.maximum:g}; lower it"
            )
        if self.mode == "adaptive" and self.delta == 0 and self.coefficient == 0:
            raise ValueError(
                "entropy: mode adaptive with delta = 0 and coefficient = 0 (c_0) never acts; set delta, or mode to off"
            )
        return self


class AlgorithmConfig(Section):
    """The algorithm: objective, advantages, loss, KL, importance correction, entropy bonus."""

    objective: ObjectiveConfig = ObjectiveConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    entropy: EntropyConfig = EntropyConfig()
