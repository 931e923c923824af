"""Importance weights for the difference between the engine, which samples, and the policy, which is trained."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from or1_megatron.config.algorithm import CorrectionLevel
from or1_megatron.interfaces import Sequences
from or1_megatron.rl.objectives.estimators import LARGEST_LOG_RATIO


def correction_weights(
    policy: Tensor,
    engine: Tensor,
    mode: Literal["truncated", "masked"],
    cap: float,
    level: CorrectionLevel = "token",
    sequences: Sequences | None = None,
    floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (importance weights w [N], which of them were cut [N]) from two log-probs of the sampled tokens.

    The engine samples from pi_engine, and the loss treats the samples as pi_k's. w = pi_k / pi_engine corrects this;
    the cap bounds its variance. ``truncated``: min(w, cap) (TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"); ``masked``: w within [floor, cap], else 0 (token: IcePop, arXiv 2510.18855,
    with 0.5 and 5; sequence and geometric: MIS, Liu et al. 2025, "When Speed Kills Stability"); ``floor`` None means
    1 / cap.

    ``level`` token: w is the token's ratio; sequence: the product of the ratios of the token's sequence; geometric:
    the geometric mean of these ratios. The last two need ``sequences``.

    Worked example, cap 2: w = 3, 1.5, 0.25 become 2, 1.5, 0.25 (truncated) or 0, 1.5, 0 (masked). As one sequence:
    product 1.125, geometric mean 1.125^(1/3) = 1.040; neither is cut.
    """
    difference = policy - engine
    if level != "token":
        if sequences is None:
            raise ValueError(f"a correction at the level {level} needs whole sequences; TokenInputs has none")
        difference = sequences.spread((sequences.sum if level == "sequence" else sequences.mean)(difference))
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if mode == "truncated":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio > cap) | (ratio < (1.0 / cap if floor is None else floor))
    return ratio.masked_fill(outside, 0.0), outside
