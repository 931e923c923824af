"""Group advantages against numbers worked by hand. They do not say which mask trains better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import group_of

from or1_megatron.config.schema import AdvantageConfig
from or1_megatron.rl.advantage import assign_advantages, group_advantages, reject

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
