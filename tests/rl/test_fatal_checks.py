"""The bounds of ``rl.fatal_checks``: the last value that passes and the first that does not, by hand.

What the loop does on such an error is in ``test_loop``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from fakes import completion, group_of, verdict

from or1_megatron.rl.fatal_checks import StaleRollout, VerificationFailing, check_verdicts, check_versions
from or1_megatron.types import Group, VersionSpan


def sampled_from(*versions: int) -> Group:
    """A group of two responses: one from version 7 alone, one whose tokens come from ``versions``, a span each."""
    mixed = completion([5] * len(versions), versions=tuple(VersionSpan(v, at) for at, v in enumerate(versions)))
    return replace(group_of([0, 0]), completions=(completion([5], versions=(VersionSpan(7, 0),)), mixed))


@pytest.mark.parametrize(
    ("versions", "max_staleness", "expected"),
    [((7,), 0, 0), ((7,), 1, 0), ((6,), 1, 1), ((6, 7), 1, 1), ((5,), 2, 2), ((5, 6, 7), 2, 2)],
)
def test_rollouts_within_the_staleness_bound_pass(versions: tuple[int, ...], max_staleness: int, expected: int) -> None:
    """Weights version 7 is about to be updated; returned is how far the oldest token is behind."""
    assert check_versions([sampled_from(7), sampled_from(*versions)], 7, max_staleness) == expected


@pytest.mark.parametrize(
    ("versions", "max_staleness", "named"),
    [
        ((6,), 0, r"\[6\], expected 7"),
        ((7, 6), 0, r"\[7, 6\], expected 7"),
        ((5,), 1, r"\[5\], expected 6 to 7"),
        ((5, 7), 1, r"\[5, 7\], expected 6 to 7"),
        ((8,), 0, r"\[8\], expected 7"),
        ((8,), 1, r"\[8\], expected 6 to 7"),
        ((), 1, "unknown, expected 6 to 7"),
    ],
)
def test_rollouts_outside_the_staleness_bound_are_refused(
    versions: tuple[int, ...], max_staleness: int, named: str
) -> None:
    """Too old by one, too new by one, in whole or in one span; or of no known version."""
    with pytest.raises(StaleRollout, match=f"sampled it from weights version {named}"):
        check_versions([sampled_from(7), sampled_from(*versions)], 7, max_staleness)


@pytest.mark.parametrize(
    ("errors", "late", "tolerated", "named"),
    [
        (1, 0, 0.25, None),
        (2, 0, 0.25, r"'error' on 2 of 4 .* share of 0\.25 \("),
        (1, 0, 0.0, r"'error' on 1 of 4 .* share of 0 \("),
        (0, 2, 0.0, None),
        (0, 3, 0.25, r"'timeout' on 3 of 4 .* share of 0\.5 \("),
    ],
)
def test_the_tolerated_share_of_failed_verdicts_is_itself_tolerated(
    errors: int, late: int, tolerated: float, named: str | None
) -> None:
    """Half of the verdicts may run out of time."""
    statuses = ["error"] * errors + ["timeout"] * late + ["wrong"] * (4 - errors - late)
    groups = [replace(group_of([0] * 4), verdicts=tuple(map(verdict, statuses)))]
    with pytest.raises(VerificationFailing, match=named) if named else nullcontext():
        check_verdicts(groups, tolerated)
