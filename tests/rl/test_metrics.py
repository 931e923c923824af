"""Metrics against numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import group_of, verdict

from or1_megatron.config.schema import AdvantageConfig
from or1_megatron.rl.advantage import assign_advantages, reject
from or1_megatron.rl.batch import pack
from or1_megatron.rl.metrics import (
    TrainerGpus,
    evaluation_metrics,
    rejection_metrics,
    rollout_metrics,
    throughput_metrics,
    time_metrics,
    update_metrics,
)
from or1_megatron.rl.mismatch import mismatch_metrics
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rl.stages import PassRateLedger
from or1_megatron.types import EvaluationResult, RolloutReport, Sample, UpdateReport, VersionSpan
from or1_verify.types import Verdict

REPORT = RolloutReport(4.0, (4.0, 2.0), 5.0, 10, 100, 0.5, 1)


def update(token_count: int, skipped: bool = False, **sums: float) -> UpdateReport:
    nothing = dict.fromkeys(("loss", "policy_loss", "entropy", "ratio", "clipped", "approx_kl"), 0.0)
    nothing |= {"abs_log_ratio": 0.0, "max_abs_log_ratio": 0.0, "max_ratio": 1.0, "max_inverse_ratio": 1.0}
    nothing |= dict.fromkeys(("clipped_low", "clipped_high", "clipped_dual"), 0.0)
    return UpdateReport({**nothing, **sums}, token_count, 2.0, 1e-6, skipped, 0.75, 0.25)


def test_fractional_rewards_are_judged_by_their_status() -> None:
    """Right from 0.5 up: 2 of 6. Equal fractions have no advantage and are rejected; different ones count by size."""
    few = [(0.1, 0.1), (0.5, 0.25), (-1.0, 0.75)]
    groups = [
        replace(group, verdicts=tuple(Verdict(r, "right" if r >= 0.5 else "wrong", "", "", 0.0) for r in rewards))
        for group, rewards in zip([group_of([0, 0]) for _ in few], few, strict=True)
    ]
    metrics = rollout_metrics(groups, REPORT)
    assert (metrics["reward/mean"], metrics["accuracy/all"]) == (pytest.approx(0.7 / 6), pytest.approx(2 / 6))
    assert (metrics["reward/min"], metrics["reward/max"]) == (-1.0, 0.75)
    kept, rejected = reject(assign_advantages(groups, AdvantageConfig(scale="none")), AdvantageConfig())
    assert [group.advantages.tolist() for group in kept] == [[0.125, -0.125], [-0.875, 0.875]]
    assert rejection_metrics(kept, rejected)["groups/rejected_all_wrong"] == 1
    ledger = PassRateLedger()
    ledger.record(0, groups[1:2])
    assert ledger.outside(0, 0.6, 1.0) and not ledger.outside(0, 0.5, 0.5)


def test_rollout_metrics() -> None:
    """Lengths 2, 2, 4, 4, one of the four truncated, one right: accuracy 1/4, of the non-truncated 1/3."""
    groups = [group_of([1, 0], length=2), group_of([0, 0], [True, False], length=4)]
    groups[1] = replace(groups[1], verdicts=(groups[1].verdicts[0], verdict("timeout")))
    metrics = rollout_metrics(groups, REPORT)
    expected = {
        "reward/mean": 0.25,
        "reward/std": 0.1875**0.5,  # of 1, 0, 0, 0
        "reward/min": 0.0,
        "reward/max": 1.0,
        "accuracy/all": 0.25,
        "accuracy/non_truncated": 1 / 3,
        "truncation/ratio": 0.25,
        "length/mean": 3.0,
        "length/p50": 3.0,
        "length/p95": 4.0,
        "length/p99": 4.0,
        "length/max": 4.0,
        "verify/right": 1,
        "verify/wrong": 1,
        "verify/truncated": 1,
        "verify/no_answer": 0,
        "verify/unreadable": 0,
        "verify/timeout": 1,
        "verify/error": 0,
        "verify/tail_s": 0.5,
        "verify/retries": 1,
        "rollout/response_tokens": 100,
        "rollout/tokens_per_s": 25.0,
        "engine/balance": 0.75,
    }
    assert metrics == pytest.approx(expected)


def test_speculation_is_counted_over_responses_that_one_request_sampled() -> None:
    """8 drafted, 2 of them sampled; 9 tokens, 2 of which took no pass of their own. The third response had no draft. A
    fourth is of two versions, and is left out."""
    first = group_of([1, 0], length=3)
    drafted = tuple(
        replace(response, drafted_tokens=given, accepted_tokens=taken)
        for response, given, taken in zip(first.completions, (6, 2), (2, 0), strict=True)
    )
    again = group_of([0], length=3)
    versions = (VersionSpan(0, 0), VersionSpan(1, 2))
    stale = replace(again, completions=(replace(again.completions[0], versions=versions, drafted_tokens=9),))
    metrics = rollout_metrics([replace(first, completions=drafted), group_of([0], length=3), stale], REPORT)
    assert metrics["speculation/acceptance"] == pytest.approx(2 / 8)
    assert metrics["speculation/tokens_per_pass"] == pytest.approx(9 / 7)


def test_undefined_metrics_are_left_out() -> None:
    metrics = rollout_metrics([group_of([0], [True])], RolloutReport(0.0, (0.0,), 0.0, 1, 1, 0.0, 0))
    assert not {"accuracy/non_truncated", "rollout/tokens_per_s", "engine/balance"} & metrics.keys()
    assert update_metrics([], on_policy=True) == {"sgd/steps": 0, "sgd/skipped": 0, "sgd/response_tokens": 0}
    assert "evaluation/non_truncated_accuracy" not in evaluation_metrics(RESULT)
    assert throughput_metrics([], [], None) == {}


def test_rejection_metrics() -> None:
    """One kept; rejected: all right, all wrong twice, and one that its mask left with a single response."""
    config = AdvantageConfig(truncation_mask="before")
    groups = [group_of([1, 0]), group_of([1, 1]), group_of([0, 0]), group_of([0, 0]), group_of([1, 0], [False, True])]
    metrics = rejection_metrics(*reject(assign_advantages(groups, config), config))
    assert [metrics[f"groups/{name}"] for name in ("kept", "rejected")] == [1, 4]
    assert [metrics[f"groups/rejected_{why}"] for why in ("all_right", "all_wrong", "other")] == [1, 2, 1]


def test_update_metrics_are_token_means_over_sgd_steps() -> None:
    """30 tokens with loss sum 3, 10 with 5: 8 / 40, not the mean of 0.1 and 0.5. The skipped step's NaN stays out."""
    updates = [
        update(30, loss=3.0, clipped=6.0),
        update(10, loss=5.0, approx_kl=4.0),
        update(5, True, loss=float("nan")),
    ]
    metrics = update_metrics(updates, on_policy=False)
    means = metrics["loss"], metrics["policy/clip_fraction"], metrics["policy/approx_kl"]
    assert means == pytest.approx((0.2, 0.15, 0.1))
    assert (metrics["sgd/steps"], metrics["sgd/skipped"], metrics["sgd/response_tokens"]) == (3, 1, 45)
    assert update_metrics(updates, on_policy=True)["policy/approx_kl"] == 0


def test_extremes_are_over_all_sgd_steps_and_options_have_metrics_where_they_are_on() -> None:
    """Largest rho 3 and smallest 1 / 4 of two steps; 40 tokens with KL 8, weights 36 of at most 2, 10 of them cut."""
    first = update(30, max_ratio=3.0, max_inverse_ratio=2.0, clipped_dual=4.0)
    second = update(10, max_ratio=2.0, max_inverse_ratio=4.0)
    metrics = update_metrics([first, second], on_policy=False)
    names = ("policy/ratio_max", "policy/ratio_min", "policy/clip_fraction_dual")
    assert [metrics[name] for name in names] == [3, 0.25, 0.1]
    assert not {"policy/kl", "correction/weight", "correction/cut_fraction"} & metrics.keys()
    options = {"kl": 4.0, "weight": 18.0, "weight_square": 40.0, "max_weight": 2.0, "weight_cut": 5.0}
    metrics = update_metrics([update(30, **options), update(10, **options)], on_policy=False)
    names = ("policy/kl", "correction/weight", "correction/weight_max", "correction/cut_fraction")
    assert [metrics[name] for name in names] == [0.2, 0.9, 2.0, 0.25]
    assert metrics["correction/effective_sample_size"] == pytest.approx(0.9**2 / 2)


def test_mismatch_of_responses_by_hand() -> None:
    """The docstring's example: d is ln 2, -ln 2 in one response and ln 2 in another."""
    half = float(np.log(0.5))
    engine = [np.array([-3.0, -2.0], dtype=np.float32), np.array([-1.0], dtype=np.float32)]
    policy = [np.array([-3.0 - half, -2.0 + half], np.float32), np.array([-1.0 - half], np.float32)]
    expected = {
        "k1": half / 3,
        "perplexity_ratio": 0.75,
        "chi_square": 1.75,
        "sequence_chi_square": 1.5,
        "mean_abs": -half,
        "max_abs": -half,
        "kl": 0.5 + half / 3,
    }
    metrics = mismatch_metrics(engine, policy)
    assert metrics == pytest.approx({f"mismatch/{name}": value for name, value in expected.items()}, rel=1e-5)
    left_out = {"mismatch/mean_abs", "mismatch/max_abs", "mismatch/kl"}
    assert mismatch_metrics(engine, policy, stale=True).keys() == metrics.keys() - left_out
    same = mismatch_metrics(engine, engine)
    assert same.pop("mismatch/perplexity_ratio") == 1 and not any(same.values())
    apart = mismatch_metrics([np.zeros(50, np.float32)], [np.full(50, -100, np.float32)])
    assert all(np.isfinite(value) for value in apart.values())
    assert mismatch_metrics(engine, [policy[0], np.array([np.nan], np.float32)]) == {}


def test_throughput_and_mfu() -> None:
    """6 real tokens in 1 s on 2 GPUs: 3 per GPU; 6 * 1e9 * 3 FLOP/s of 1e12."""
    sample = Sample(np.zeros(2, np.int32), np.zeros(4, np.int32), 0.0, np.ones(4, np.bool_))
    batch = pack([sample], BatchLayout(1, 64, 8))
    metrics = throughput_metrics([batch], [update(4)], TrainerGpus(2, 1e12, 1_000_000_000))
    assert metrics == pytest.approx({"train/tokens_per_s": 6, "train/tokens_per_s_per_gpu": 3, "train/mfu": 0.018})


RESULT = EvaluationResult(0.5, None, 1.0, 7.0, 3, 8, decode_s=5.0, wall_s=6.0)


@pytest.mark.parametrize(
    ("wall_s", "busy", "overlaps", "other_s", "other_with_score_s", "utilization"),
    [
        # Engines decode 4 s in training (mean 3 s per engine) and 5 s in evaluation, update 1 s, score 2 s: 20 - 12.
        (20.0, [REPORT, update(4), RESULT], False, 8.0, 10.0, 3 / 20),
        # Where training (3 s) and decoding (4 s) overlap, the longer counts; the mean of 3 s is of 6 s between reports.
        (20.0, [replace(REPORT, period_s=6.0), update(4)], True, 16.0, 16.0, 3 / 6),
        (10.0, [REPORT, update(4)], True, 6.0, 6.0, 3 / 10),
    ],
)
def test_time_metrics(
    wall_s: float, busy: list[Any], overlaps: bool, other_s: float, other_with_score_s: float, utilization: float
) -> None:
    """``other_share_with_score`` has the score pass in it, as in the paper, unless it ran while engines decoded."""
    assert time_metrics(wall_s, {"roll_out": 5.0, "score": 2.0}, busy, overlaps) == pytest.approx(
        {
            "time/roll_out": 5.0,
            "time/score": 2.0,
            "time/step": wall_s,
            "time/other": other_s,
            "other_share": other_s / wall_s,
            "other_share_with_score": other_with_score_s / wall_s,
            "engine/utilization": utilization,
        }
    )
