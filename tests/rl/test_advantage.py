"""Group advantages against numbers worked by hand. They do not say which mask trains better."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import group_of

from or1_megatron.config.schema import AdvantageConfig
from or1_megatron.rl.advantage import assign_advantages, group_advantages, reject

EXACT = AdvantageConfig(eps=0.0)


def test_unbiased_std_by_hand() -> None:
    """r = (1, 0, 0, 0): mean 1/4, squared deviations 9/16 + 3/16 = 3/4, over 3: variance 1/4."""
    np.testing.assert_array_equal(group_advantages(group_of([1, 0, 0, 0]), EXACT), [1.5, -0.5, -0.5, -0.5])


def test_biased_std_by_hand() -> None:
    """Variance 3/4 over 4: 3/16, std sqrt(3)/4; A = 3/4 / std = sqrt(3), -1/4 / std = -1/sqrt(3)."""
    found = group_advantages(group_of([1, 0, 0, 0]), AdvantageConfig(std_ddof=0, eps=0.0))
    np.testing.assert_allclose(found, [3**0.5] + [-(3**-0.5)] * 3, rtol=1e-7)


def test_eps_stands_beside_std() -> None:
    """A = (3/4) / (1/2 + 1/2)."""
    found = group_advantages(group_of([1, 0, 0, 0]), AdvantageConfig(eps=0.5))
    np.testing.assert_array_equal(found, [0.75, -0.25, -0.25, -0.25])


def test_truncation_mask_before() -> None:
    """Over (1, 0) alone: mean 1/2, variance 1/2: A = +-1/2 * sqrt(2); truncated ones 0."""
    group = group_of([1, 0, 0, 0], [False, False, True, True])
    found = group_advantages(group, AdvantageConfig(eps=0.0, truncation_mask="before"))
    np.testing.assert_allclose(found, [0.5**0.5, -(0.5**0.5), 0, 0], rtol=1e-7)


def test_truncation_mask_after_and_none() -> None:
    group = group_of([1, 0, 0, 0], [False, False, True, True])
    after = group_advantages(group, AdvantageConfig(eps=0.0, truncation_mask="after"))
    np.testing.assert_array_equal(after, [1.5, -0.5, 0, 0])
    np.testing.assert_array_equal(group_advantages(group, EXACT), [1.5, -0.5, -0.5, -0.5])


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


def test_a_truncated_response_may_be_right() -> None:
    """As with the released code's judge. Under ``none`` it counts like any other: (1, 0) has mean 1/2, variance 1/2.
    The masks take its advantage, whatever its reward."""
    group = group_of([1, 0], [True, False])
    np.testing.assert_allclose(group_advantages(group, EXACT), [0.5**0.5, -(0.5**0.5)], rtol=1e-7)
    after = group_advantages(group, AdvantageConfig(eps=0.0, truncation_mask="after"))
    np.testing.assert_allclose(after, [0, -(0.5**0.5)], rtol=1e-7)
    before = group_advantages(
        group_of([1, 1, 0], [True, False, False]), AdvantageConfig(truncation_mask="before", eps=0)
    )
    np.testing.assert_allclose(before, [0, 0.5**0.5, -(0.5**0.5)], rtol=1e-7)
