"""What is taken off rewards before advantages, against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import Clock, TablePolicy, TableRollouts, group_of

from or1_megatron.config.schema import AdvantageConfig, AlgorithmConfig, CorrectionConfig, StageConfig
from or1_megatron.rl.advantage import assign_advantages, group_advantages, reject
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rl.penalties import overlong, reward_penalties

STAGE = StageConfig(name="s", steps=1, max_response_tokens=8, prompts_per_step=2, prompts_per_update=2, group_size=2)


def penalties(algorithm: AlgorithmConfig, length: int) -> list[np.ndarray] | None:
    """Return those of one group, two responses of this length; the reference is uniform over eight tokens."""
    clock = Clock()
    policy = TablePolicy(4, TableRollouts(clock), clock)
    groups = [group_of([1, 0], length=length)]
    return reward_penalties(policy, groups, STAGE, algorithm, BatchLayout(data_ranks=1, budget_tokens=64, alignment=2))


def test_soft_overlong_penalty_by_hand() -> None:
    """DAPO's eq. 13 with L_max 20 and L_cache 4: 0 up to 16 tokens, 1/4 at 17, 1 at 20."""
    np.testing.assert_allclose(overlong(np.array([1, 16, 17, 19, 20]), 20, 4), [0, 0, 0.25, 0.75, 1])
    soft = AlgorithmConfig(advantage=AdvantageConfig(overlong_tokens=4, overlong_penalty=2.0))
    (found,) = penalties(soft, 7) or []
    np.testing.assert_allclose(found, [1.5, 1.5])  # 2 * (7 - 4) / 4
    assert penalties(AlgorithmConfig(), 7) is None


def test_the_default_penalty_has_the_papers_strength() -> None:
    """DAPO's rewards are 1 and -1 and its longest response loses 1; of four right in eight one is that long. By hand:
    rewards (0, 1, 1, 1, -1, -1, -1, -1)."""
    paper = np.array([0.0, 1, 1, 1, -1, -1, -1, -1])
    taken_off = AdvantageConfig(overlong_tokens=4).overlong_penalty * np.array([1.0, 0, 0, 0, 0, 0, 0, 0])
    found = group_advantages(group_of([1, 1, 1, 1, 0, 0, 0, 0]), AdvantageConfig(), taken_off)
    np.testing.assert_allclose(found, (paper - paper.mean()) / paper.std(ddof=1), rtol=1e-5)


def test_kl_in_the_reward_by_hand() -> None:
    """Engine log-probs -1, reference ln 1/8, so d is ln 8 - 1; three tokens at beta 0.1; capped at 1 each."""
    d = np.log(8) - 1
    for estimator, cap, per_token in (
        ("k1", None, d),
        ("k1", 1.0, 1.0),
        ("k2", None, d**2 / 2),
        ("k3", None, np.exp(-d) - 1 + d),
    ):
        kl = {"where": "reward", "estimator": estimator, "coefficient": 0.1, "reference": "folder", "cap": cap}
        (found,) = penalties(AlgorithmConfig.model_validate({"kl": kl}), 3) or []
        np.testing.assert_allclose(found, [0.3 * per_token] * 2, rtol=1e-6)


def test_penalties_move_advantages() -> None:
    """Rewards (1, 0) less (0.5, 0): differences (0.25, -0.25), without division by the deviation."""
    config = AdvantageConfig(scale="none")
    group = group_of([1, 0])
    np.testing.assert_allclose(group_advantages(group, config, np.array([0.5, 0.0])), [0.25, -0.25])
    np.testing.assert_allclose(group_advantages(group_of([1, 0, 0, 0]), config), [0.75, -0.25, -0.25, -0.25])


def test_groups_that_are_all_right_or_wrong_stay_out_though_penalties_differ() -> None:
    """Dynamic sampling goes by accuracy: a group of two wrong responses of different lengths is rejected."""
    config = AdvantageConfig()
    made = assign_advantages([group_of([0, 0]), group_of([1, 0])], config, [np.array([0.5, 0.0])] * 2)
    assert all(group.advantages.any() for group in made)
    kept, rejected = reject(made, config)
    assert (kept, rejected) == ([made[1]], [made[0]])


def test_contradictions() -> None:
    with pytest.raises(ValueError, match="level = geometric has no effect with mode = off"):
        CorrectionConfig(level="geometric")
    with pytest.raises(ValueError, match="cap = 3 has no effect with mode = off"):
        CorrectionConfig(cap=3.0)
    with pytest.raises(ValueError, match=r"floor = 0\.4 has no effect with mode = truncated"):
        CorrectionConfig(mode="truncated", floor=0.4)
    with pytest.raises(ValueError, match="std_ddof = 0 and eps = 1e-06 have no effect with scale = none"):
        AdvantageConfig(scale="none", std_ddof=0)
    with pytest.raises(ValueError, match="overlong_penalty = 2 has no effect without overlong_tokens"):
        AdvantageConfig(overlong_penalty=2.0)
    with pytest.raises(ValueError, match="overlong_tokens = 4 penalises long responses, but truncation_mask = before"):
        AdvantageConfig(overlong_tokens=4, truncation_mask="before")
    for kl, expected in (
        ({"where": "reward"}, "changes no reward"),
        (
            {"where": "reward", "coefficient": 0.1, "reference": "f", "straight_through": True},
            "where = reward has none",
        ),
        ({"reference": "f", "straight_through": True, "estimator": "k2"}, "takes the gradient of k2"),
    ):
        with pytest.raises(ValueError, match=expected):
            AlgorithmConfig.model_validate({"kl": kl})
