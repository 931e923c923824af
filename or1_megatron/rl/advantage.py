"""Group-relative advantages, truncation masks, and rejection of groups without advantage (RECIPE sections 1 and 3).

Advantages are computed on whole groups, before groups are rejected, split into mini-batches or packed.

Shapes: M responses of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from or1_megatron.config.algorithm import AdvantageConfig
from or1_megatron.types import AdvantagedGroup, Float32Array, Group


def normalised(rewards: NDArray[np.float64], config: AdvantageConfig) -> NDArray[np.float64]:
    """Return the advantages A_i = (r_i - mean(r)) / (std(r) + eps) of rewards r [n] (RECIPE section 1, "Advantage").

    With ``scale`` none, A_i = r_i - mean(r) (Dr. GRPO, arXiv 2503.20783). The result [n] is exactly zero for equal
    rewards and for fewer than two rewards.

    Worked example, ddof 1: r = (1, 0, 0, 0) has mean 1/4, variance (9/16 + 3/16) / 3 = 1/4 and std 1/2, so
    A = (3/2, -1/2, -1/2, -1/2). With scale none, A = (3/4, -1/4, -1/4, -1/4).
    """
    if rewards.size < 2 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    difference = rewards - rewards.mean()
    return difference if config.scale == "none" else difference / (rewards.std(ddof=config.std_ddof) + config.eps)


def group_advantages(
    group: Group, config: AdvantageConfig, penalties: NDArray[np.float64] | None = None
) -> Float32Array:
    """Return the group's advantages [M], one per response, under the configured truncation mask (RECIPE section 3).

    ``penalties`` [M] are subtracted from the rewards first (``rl.penalties``).

    With mask ``none`` all responses count. With ``before``, truncated responses are left out of mean and std and get
    advantage 0. With ``after``, they count in mean and std, and then get advantage 0. A truncated response has reward
    0, except with the released code's judge (``verify.math.judge: math_verify``).
    """
    rewards, truncated = group.rewards.astype(np.float64), group.truncated
    rewards = rewards if penalties is None else rewards - penalties
    if config.truncation_mask == "before":
        advantages = np.zeros_like(rewards)
        advantages[~truncated] = normalised(rewards[~truncated], config)
    else:
        advantages = normalised(rewards, config)
        if config.truncation_mask == "after":
            advantages[truncated] = 0.0
    return advantages.astype(np.float32)


def assign_advantages(
    groups: Sequence[Group], config: AdvantageConfig, penalties: Sequence[NDArray[np.float64]] | None = None
) -> list[AdvantagedGroup]:
    """Return every group with its advantages, in the order given. ``penalties``: None, or an array [M] per group."""
    of_groups = [None] * len(groups) if penalties is None else penalties
    return [AdvantagedGroup(g, group_advantages(g, config, p)) for g, p in zip(groups, of_groups, strict=True)]


def reject(
    groups: Sequence[AdvantagedGroup], config: AdvantageConfig
) -> tuple[list[AdvantagedGroup], list[AdvantagedGroup]]:
    """Return (kept, rejected) groups, each in the order given. Groups with all-zero advantages are rejected (RECIPE 1).

    Groups whose rewards are all equal are rejected even if penalties give them advantages, because DAPO's dynamic
    sampling filters by accuracy. With ``reject_uniform_groups`` off, all groups are kept. ``rl.supply`` samples more
    prompts to replace rejected groups. A step without a kept group makes no SGD step (``rl.loop``).
    """
    uniform = config.reject_uniform_groups
    keep = [not uniform or bool(group.advantages.any() and np.ptp(group.group.rewards) > 0) for group in groups]
    kept = [group for group, kept_one in zip(groups, keep, strict=True) if kept_one]
    rejected = [group for group, kept_one in zip(groups, keep, strict=True) if not kept_one]
    return kept, rejected
