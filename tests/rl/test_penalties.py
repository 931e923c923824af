"""What is taken off rewards before advantages, against numbers worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import group_of

from or1_megatron.config.schema import AdvantageConfig, CorrectionConfig
from or1_megatron.rl.advantage import assign_advantages, group_advantages, reject
from or1_megatron.rl.penalties import overlong, reward_penalties


def test_soft_overlong_penalty_by_hand() -> None:
    """DAPO's eq. 13 with L_max 20 and L_cache 4: 0 up to 16 tokens, 1/4 at 17, 1 at 20."""
    np.testing.assert_allclose(overlong(np.array([1, 16, 17, 19, 20]), 20, 4), [0, 0, 0.25, 0.75, 1])
    groups = [group_of([1, 0], length=7)]
    (penalties,) = reward_penalties(groups, AdvantageConfig(overlong_tokens=4, overlong_penalty=2.0), 8) or []
    np.testing.assert_allclose(penalties, [1.5, 1.5])  # 2 * (7 - 4) / 4
    assert reward_penalties(groups, AdvantageConfig(), 8) is None


def test_the_default_penalty_has_the_papers_strength() -> None:
    """DAPO's rewards are 1 and -1 and its longest response loses 1; of four right in eight one is that long. By hand:
    rewards (0, 1, 1, 1, -1, -1, -1, -1)."""
    paper = np.array([0.0, 1, 1, 1, -1, -1, -1, -1])
    taken_off = AdvantageConfig(overlong_tokens=4).overlong_penalty * np.array([1.0, 0, 0, 0, 0, 0, 0, 0])
    advantages = group_advantages(group_of([1, 1, 1, 1, 0, 0, 0, 0]), AdvantageConfig(), taken_off)
    np.testing.assert_allclose(advantages, (paper - paper.mean()) / paper.std(ddof=1), rtol=1e-5)


def test_penalties_move_advantages() -> None:
    """Rewards (1, 0) less (0.5, 0): differences (0.25, -0.25), without division by the deviation."""
    config = AdvantageConfig(scale="none")
    group = group_of([1, 0])
    np.testing.assert_allclose(group_advantages(group, config, np.array([0.5, 0.0])), [0.25, -0.25])


def test_groups_that_are_all_right_or_wrong_stay_out_though_penalties_differ() -> None:
    """Dynamic sampling goes by accuracy: a group of two wrong responses of different lengths is rejected."""
    config = AdvantageConfig()
    made = assign_advantages([group_of([0, 0]), group_of([1, 0])], config, [np.array([0.5, 0.0])] * 2)
    assert all(group.advantages.any() for group in made)
    kept, rejected = reject(made, config)
    assert (kept, rejected) == ([made[1]], [made[0]])


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        (CorrectionConfig, {"level": "geometric"}, "level = geometric has no effect with mode = off"),
        (CorrectionConfig, {"cap": 3.0}, "cap = 3 has no effect with mode = off"),
        (CorrectionConfig, {"mode": "truncated", "floor": 0.4}, r"floor = 0\.4 has no effect with mode = truncated"),
        (AdvantageConfig, {"scale": "none", "std_ddof": 0}, "std_ddof = 0 has no effect with scale = none"),
        (AdvantageConfig, {"overlong_penalty": 2.0}, "overlong_penalty = 2 has no effect without overlong_tokens"),
        (
            AdvantageConfig,
            {"overlong_tokens": 4, "truncation_mask": "before"},
            "overlong_tokens = 4 penalises long responses, but truncation_mask = before",
        ),
    ],
)
def test_contradictions(section: Any, values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        section.model_validate(values)
