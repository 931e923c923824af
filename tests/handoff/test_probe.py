"""What the probe lets through and what it stops, on numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.failures import HandoffMismatch
from or1_megatron.handoff.probe import Probe, compare_probe, probe_tokens

POLICY = [np.array([-1.0, -2.0, -3.0], dtype=np.float32), np.array([-0.5], dtype=np.float32)]


def test_largest_difference_over_engines_and_sequences() -> None:
    near = [POLICY[0] + np.float32(1e-4), POLICY[1]]
    other = [POLICY[0], POLICY[1] - np.float32(3e-4)]
    assert compare_probe([near, other], POLICY, bound=1e-3) == pytest.approx(3e-4, rel=1e-2)


def test_mismatch_names_engine_token_both_values_and_bound() -> None:
    wrong = [POLICY[0] + np.array([0.0, 0.25, 0.01], dtype=np.float32), POLICY[1]]
    with pytest.raises(HandoffMismatch, match=r"engine 1 .*sequence 0: token 2.*-1\.750000.*-2\.000000.*0\.25.*0\.001"):
        compare_probe([POLICY, wrong], POLICY, bound=1e-3)


def test_not_a_number_never_passes() -> None:
    broken = [np.array([-1.0, np.nan, -3.0], dtype=np.float32), POLICY[1]]
    with pytest.raises(HandoffMismatch, match="token 2"):
        compare_probe([broken], POLICY, bound=1e9)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine 0 scored \[3\] tokens, the policy \[3, 1\]"):
        compare_probe([POLICY[:1]], POLICY, bound=1.0)


def test_probe_tokens_are_the_same_everywhere() -> None:
    first, second = probe_tokens(1000, 8)
    assert first.dtype == np.int32 and len(first) == len(second) == 8
    assert first.tolist() == probe_tokens(1000, 8)[0].tolist()
    assert first.tolist() != second.tolist()
    assert max(first.max(), second.max()) < 1000


def test_the_probe_scores_as_many_tokens_as_asked_and_fits_the_engine() -> None:
    for dtype, longest, least in (("float32", 4096, 94), ("float32", 20, 94), ("bfloat16", 4096, 512)):
        probe = Probe(HandoffConfig(), dtype, 1000, longest)  # type: ignore[arg-type]
        assert sum(len(ids) - 1 for ids in probe.token_ids) >= least
        assert max(map(len, probe.token_ids)) < longest  # one more is decoded


def shifted(by: float) -> list[list[np.ndarray]]:
    """An engine that is right, and one that is off by this much, up and down, at every token."""
    return [POLICY, [values + np.float32(by) * (-1) ** np.arange(len(values)) for values in POLICY]]


def test_bfloat16_is_held_against_the_first_handoff() -> None:
    probe = Probe(HandoffConfig(probe_bound=0.1, probe_growth=3.0), "bfloat16", 1000, 64)
    with pytest.raises(HandoffMismatch, match=r"engine 1 .*over 4 probe tokens.*0\.125 on average.*probe_bound.*0\.1"):
        probe.judge(shifted(0.125), POLICY)
    assert probe.judge(shifted(0.02), POLICY).mean == pytest.approx(0.02, rel=1e-4)
    assert probe.judge(shifted(0.05), POLICY).largest == pytest.approx(0.05, rel=1e-4)
    with pytest.raises(HandoffMismatch, match=r"engine 1 .*0\.07 on average.*3 times the 0\.02 of the run's first"):
        probe.judge(shifted(0.07), POLICY)
    with pytest.raises(HandoffMismatch):
        probe.judge(shifted(float("nan")), POLICY)


def test_float32_reports_largest_and_mean() -> None:
    found = Probe(HandoffConfig(), "float32", 1000, 64).judge(shifted(4e-4), POLICY)
    assert (found.largest, found.mean) == pytest.approx((4e-4, 4e-4), rel=1e-2)
