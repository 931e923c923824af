"""Group advantages, and what is taken off rewards before them, against numbers worked by hand.

They do not say which mask trains better.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import group_of

from or1_megatron.config.schema import AdvantageConfig, CorrectionConfig
from or1_megatron.rl.advantage import assign_advantages, group_advantages, reject
from or1_megatron.rl.penalties import overlong, reward_penalties
from or1_megatron.rl.supply import KeepsGroup

CUT = [False, False, True, True]


@pytest.mark.parametrize(
    ("rewards", "truncated", "settings", "expected"),
    [
        # Mean 1/4, squared deviations 9/16 + 3/16 = 3/4; over 3 the variance is 1/4, over 4 it is 3/16.
        ([1, 0, 0, 0], None, {}, [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], None, {"std_ddof": 0}, [3**0.5] + [-(3**-0.5)] * 3),
        ([1, 0, 0, 0], None, {"eps": 0.5}, [0.75, -0.25, -0.25, -0.25]),  # (3/4) / (1/2 + 1/2)
        ([1, 0, 0, 0], None, {"scale": "none", "eps": 1e-6}, [0.75, -0.25, -0.25, -0.25]),
        # before: over (1, 0) alone, of mean and variance 1/2; after: over all, then 0; none: like any other.
        ([1, 0, 0, 0], CUT, {"truncation_mask": "before"}, [0.5**0.5, -(0.5**0.5), 0, 0]),
        ([1, 0, 0, 0], CUT, {"truncation_mask": "after"}, [1.5, -0.5, 0, 0]),
        ([1, 0, 0, 0], CUT, {}, [1.5, -0.5, -0.5, -0.5]),
        # A truncated response may be right, as with the released code's judge; the masks take its advantage too.
        ([1, 0], [True, False], {}, [0.5**0.5, -(0.5**0.5)]),
        ([1, 0], [True, False], {"truncation_mask": "after"}, [0, -(0.5**0.5)]),
        ([1, 1, 0], [True, False, False], {"truncation_mask": "before"}, [0, 0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_advantages_by_hand(
    rewards: list[int], truncated: list[bool] | None, settings: dict[str, Any], expected: list[float]
) -> None:
    """With eps 0 unless given."""
    config = AdvantageConfig.model_validate({"eps": 0.0} | settings)
    np.testing.assert_allclose(group_advantages(group_of(rewards, truncated), config), expected, rtol=1e-7)


@pytest.mark.parametrize("mask", ["before", "after"])
def test_mask_that_leaves_nothing_rejects(mask: str) -> None:
    """One response left of two under ``before``, none under ``after`` with all truncated."""
    config = AdvantageConfig.model_validate({"truncation_mask": mask})
    group = group_of([1, 0], [False, True]) if mask == "before" else group_of([0, 0], [True, True])
    kept, rejected = reject(assign_advantages([group], config), config)
    assert not kept and rejected[0].group is group


def test_rejects_uniform_groups_in_order() -> None:
    groups = [group_of(r, j=j) for j, r in enumerate([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1]])]
    advantaged = assign_advantages(groups, AdvantageConfig())
    kept, rejected = reject(advantaged, AdvantageConfig())
    assert [g.group.prompt.problem.id for g in kept] == ["p1", "p3"]
    assert [g.group.prompt.problem.id for g in rejected] == ["p0", "p2"]
    everything = AdvantageConfig(reject_uniform_groups=False)
    assert reject(advantaged, everything) == (advantaged, [])


def test_soft_overlong_penalty_by_hand() -> None:
    """DAPO's eq. 13 with L_max 20 and L_cache 4: 0 up to 16 tokens, 1/4 at 17, 1 at 20."""
    np.testing.assert_allclose(overlong(np.array([1, 16, 17, 19, 20]), 20, 4), [0, 0, 0.25, 0.75, 1])
    groups = [group_of([1, 0], length=7)]
    (penalties,) = reward_penalties(groups, AdvantageConfig(overlong_tokens=4, overlong_penalty=2.0), 8) or []
    np.testing.assert_allclose(penalties, [1.5, 1.5])  # 2 * (7 - 4) / 4
    assert reward_penalties(groups, AdvantageConfig(), 8) is None


def test_refill_counts_a_group_as_the_loop_does() -> None:
    """The right response loses its whole reward by its length of 8, of at most 8; of at most 16 it loses nothing."""
    config = AdvantageConfig(overlong_tokens=4, overlong_penalty=1.0)
    long, short = group_of([1, 0], length=8), group_of([1, 0], length=3)
    group = replace(long, completions=(long.completions[0], short.completions[1]))
    assert (KeepsGroup(config, 8)(group), KeepsGroup(config, 16)(group)) == (False, True)


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
