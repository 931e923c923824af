"""Computes the metrics of a step from its records; ``schemas.metrics`` has the units and meanings of all metrics.

A metric that a step cannot measure (every response truncated, no SGD step, no evaluation due) is left out of the
step's metrics; no metric is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np

from or1_megatron.config.schema import StageConfig
from or1_megatron.rl.batch import real_tokens
from or1_megatron.rl.entropy import EntropyReading
from or1_megatron.rl.fatal_checks import count_rejected
from or1_megatron.rl.mismatch import mismatch_metrics
from or1_megatron.types import (
    AdvantagedGroup,
    Batch,
    EvaluationResult,
    Group,
    HandoffReport,
    RolloutReport,
    TokenScores,
    UpdateReport,
)
from or1_verify.types import VerdictStatus


@dataclass(frozen=True, slots=True)
class TrainerGpus:
    """The number of the trainer's GPUs, their peak FLOP/s and the model's parameters: all that MFU needs."""

    gpus: int
    peak_flops_per_gpu: float | None
    """Peak FLOP/s of one GPU; None: unknown, so that MFU is not reported."""
    parameters: int


@dataclass(frozen=True, slots=True)
class Filtered:
    """How many problems the online filter dropped at a stage boundary, and how many are left."""

    solved: int
    outside: int
    """Number of problems, without the ``solved`` ones, whose pass rate is outside the stage's limits."""
    left: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything about one rollout step that its metrics need."""

    stage_index: int
    stage: StageConfig
    filtered: Filtered | None
    """The problems that the online filter dropped; None: no filter was due."""
    groups: Sequence[Group]
    kept: Sequence[AdvantagedGroup]
    rejected: Sequence[AdvantagedGroup]
    rollout: RolloutReport
    reading: EntropyReading
    batches: Sequence[Batch]
    updates: Sequence[UpdateReport]
    handoff: HandoffReport | None
    """None: the handoff was skipped, because the run stops after this step."""
    staleness: int = 0
    """Versions by which the oldest sampled token was behind the policy."""
    scores: TokenScores | None = None
    """The first scores that the policy gave the kept groups' responses in this step; None: there are none."""


def step_metrics(step: StepRecord, hardware: TrainerGpus | None = None) -> dict[str, float]:
    """Return all metrics of a step except its times and its evaluation."""
    metrics: dict[str, float] = {
        "stage/index": step.stage_index,
        "stage/max_response_tokens": step.stage.max_response_tokens,
        **rollout_metrics(step.groups, step.rollout),
        **rejection_metrics(step.kept, step.rejected),
        **refill_metrics(step),
        "entropy/sampled": step.reading.sampled,
        "entropy/estimate": step.reading.entropy,
        "entropy/coefficient": step.reading.alpha,
        "entropy/controller": step.reading.controller,
        "rollout/staleness": step.staleness,
        **update_metrics(step.updates, step.stage.sgd_steps == 1 and step.staleness == 0),
        **handoff_metrics(step.handoff),
        **throughput_metrics(step.batches, step.updates, hardware),
    }
    if step.filtered is not None:
        metrics |= {f"filter/{name}": count for name, count in asdict(step.filtered).items()}
    if step.scores is not None:
        engine = [completion.log_probs for group in step.kept for completion in group.group.completions]
        metrics |= mismatch_metrics(engine, step.scores.log_probs, step.staleness > 0)
    return metrics


def rollout_metrics(groups: Sequence[Group], report: RolloutReport) -> dict[str, float]:
    """Return the metrics of all responses, including the responses of rejected groups."""
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    right = np.concatenate([group.right for group in groups])
    truncated = np.concatenate([group.truncated for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([completion.token_ids.size for completion in completions])
    statuses = [verdict.status for group in groups for verdict in group.verdicts]
    metrics: dict[str, float] = {
        **{f"reward/{name}": getattr(rewards, name)() for name in ("mean", "std", "min", "max")},
        "accuracy/all": right.mean(),
        "truncation/ratio": truncated.mean(),
        "length/mean": lengths.mean(),
        "length/max": lengths.max(),
        **{f"length/p{q}": np.percentile(lengths, q) for q in (50, 95, 99)},
        **{f"verify/{status}": statuses.count(status) for status in get_args(VerdictStatus)},
        "verify/tail_s": report.verify_tail_s,
        "verify/retries": report.verifier_retries,
        "rollout/response_tokens": report.response_tokens,
    }
    routed = [completion.routed_experts for completion in completions]
    if routed[0] is not None:
        metrics["routing/bytes"] = sum(experts.nbytes for experts in routed if experts is not None)
    entropies = np.array([completion.entropy for completion in completions])
    if not np.isnan(entropies).any():
        metrics["rollout/entropy"] = np.average(entropies, weights=lengths)
    whole = [completion for completion in completions if len(completion.versions) == 1]  # the rest lack some counts
    if drafted := sum(completion.drafted_tokens for completion in whole):
        accepted = sum(completion.accepted_tokens for completion in whole)
        tokens = sum(completion.token_ids.size for completion in whole)
        metrics["speculation/acceptance"] = accepted / drafted
        metrics["speculation/tokens_per_pass"] = tokens / (tokens - accepted)
    if not truncated.all():
        metrics["accuracy/non_truncated"] = right[~truncated].mean()
    if report.decode_s > 0:
        metrics["rollout/tokens_per_s"] = report.response_tokens / report.decode_s
        metrics["engine/balance"] = float(np.mean(report.engine_busy_s)) / report.decode_s
    return {name: float(value) for name, value in metrics.items()}


def handoff_metrics(report: HandoffReport | None) -> dict[str, float]:
    """Return the handoff's metrics, and the probe's metrics if a probe was due. Without a handoff, return {}."""
    if report is None:
        return {}
    return _measured(
        {
            "handoff/bytes": report.bytes_sent,
            "handoff/transfer_s": report.transfer_s,
            "handoff/probe_s": report.probe_s,
            "handoff/probe_max_abs_diff": report.probe_max_abs_diff,
            "handoff/probe_mean_abs_diff": report.probe_mean_abs_diff,
        }
    )


def _measured(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


def rejection_metrics(kept: Sequence[AdvantagedGroup], rejected: Sequence[AdvantagedGroup]) -> dict[str, float]:
    right, wrong, other = count_rejected(rejected)
    return {
        "groups/kept": len(kept),
        "groups/rejected": len(rejected),
        "groups/rejected_all_right": right,
        "groups/rejected_all_wrong": wrong,
        "groups/rejected_other": other,
    }


def refill_metrics(step: StepRecord) -> dict[str, float]:
    """Return the refill's metrics. In a stage without refill, return {}."""
    if step.stage.refill_prompts == 0:
        return {}
    wanted = step.stage.prompts_per_step
    return {
        "refill/prompts": len(step.groups) - wanted,
        "refill/missing": max(0, wanted - len(step.kept)),
        "refill/surplus_responses": step.rollout.surplus_responses,
    }


def update_metrics(updates: Sequence[UpdateReport], on_policy: bool) -> dict[str, float]:
    """Return the metrics of the SGD steps. Means are over all counted tokens of the steps that were not skipped,
    because a skipped step's loss or gradient is not finite."""
    done = [update for update in updates if not update.skipped]
    metrics: dict[str, float] = {
        "sgd/steps": len(updates),
        "sgd/skipped": len(updates) - len(done),
        "sgd/response_tokens": sum(update.token_count for update in updates),
    }
    if done:
        tokens = sum(update.token_count for update in done)
        mean = {name: sum(update.sums[name] for update in done) / tokens for name in done[0].sums}
        metrics |= {
            "policy/grad_norm": float(np.mean([update.grad_norm for update in done])),
            "policy/learning_rate": done[-1].learning_rate,
        }
        metrics |= {metric: mean[name] for metric, name in _MEANS.items() if name in mean}
        largest = {name: max(update.sums[name] for update in done) for name in mean if name.startswith("max_")}
        if "max_ratio" in largest:
            metrics["policy/ratio_max"] = largest["max_ratio"]
            metrics["policy/ratio_min"] = 1.0 / largest["max_inverse_ratio"]
        if "max_weight" in largest:
            metrics["correction/weight_max"] = largest["max_weight"]
        if mean.get("weight_square", 0.0) > 0:
            metrics["correction/effective_sample_size"] = mean["weight"] ** 2 / mean["weight_square"]
        if on_policy and "policy/approx_kl" in metrics:
            metrics["policy/approx_kl"] = 0.0  # the objective's k3 compares with the engine: reported under mismatch
    return metrics


_MEANS: Mapping[str, str] = {
    "loss": "loss",
    "policy/loss": "policy_loss",
    "policy/ratio": "ratio",
    "policy/clip_fraction": "clipped",
    "policy/clip_fraction_low": "clipped_low",
    "policy/clip_fraction_high": "clipped_high",
    "policy/clip_fraction_dual": "clipped_dual",
    "policy/approx_kl": "approx_kl",
    "policy/kl": "kl",
    "entropy/full": "entropy",
    "correction/weight": "weight",
    "correction/cut_fraction": "weight_cut",
    "routing/rerouted": "rerouted",
}
"""For each metric that is a mean over tokens, the name of the objective's sum. No objective has all of these sums."""


def throughput_metrics(
    batches: Sequence[Batch], updates: Sequence[UpdateReport], hardware: TrainerGpus | None
) -> dict[str, float]:
    """Return the training speed and, on GPUs, MFU without attention's FLOPs. If no SGD step was made, return {}."""
    train_s = sum(update.forward_backward_s + update.optimizer_s for update in updates)
    if train_s <= 0:
        return {}
    tokens_per_s = sum(real_tokens(batch) for batch in batches) / train_s
    if hardware is None:
        return {"train/tokens_per_s": tokens_per_s}
    per_gpu = tokens_per_s / hardware.gpus
    metrics = {"train/tokens_per_s": tokens_per_s, "train/tokens_per_s_per_gpu": per_gpu}
    if hardware.peak_flops_per_gpu is not None:
        metrics["train/mfu"] = 6 * hardware.parameters * per_gpu / hardware.peak_flops_per_gpu
    return metrics


def evaluation_metrics(result: EvaluationResult | None) -> dict[str, float]:
    """Return the metrics of an evaluation, and of each of its sets if it has several. Without evaluation, return {}."""
    if result is None:
        return {}
    metrics: dict[str, float | None] = {}
    for prefix, one in [("", result), *((f"{title}/", of_set) for title, of_set in result.sets.items())]:
        metrics |= {
            f"evaluation/{prefix}accuracy": one.accuracy,
            f"evaluation/{prefix}non_truncated_accuracy": one.non_truncated_accuracy,
            f"evaluation/{prefix}truncation_ratio": one.truncation_ratio,
            f"evaluation/{prefix}mean_length": one.mean_length_tokens,
            f"evaluation/{prefix}entropy": one.entropy,
            f"evaluation/{prefix}samples": one.samples,
            **{f"evaluation/{prefix}{name}": value for name, value in one.more.items()},
        }
    return _measured(metrics)


def time_metrics(
    wall_s: float,
    seconds: Mapping[str, float],
    busy: Sequence[RolloutReport | EvaluationResult | UpdateReport],
    overlaps: bool = False,
) -> dict[str, float]:
    """Return ``time/<verb>`` of the verbs that ran, ``time/step``, ``time/other``, ``other_share``,
    ``other_share_with_score`` and ``engine/utilization``.

    other = wall time - decoding time of the engines - (forward, backward, optimizer) time, from this step's reports
    ``busy``. ``other_share`` counts a ``score`` pass as forward. ``other_share_with_score`` counts it as other, as the
    paper's t_O does. ``overlaps``: engines decode while the policy trains. Then only the longer of the two times is
    subtracted, and the engines' utilization is their busy time over the ``period_s`` of the rollouts' reports.
    """
    updates = [report for report in busy if isinstance(report, UpdateReport)]
    decoded = [report for report in busy if not isinstance(report, UpdateReport)]
    update_s = sum(report.forward_backward_s + report.optimizer_s for report in updates)
    decode_s = sum(report.decode_s for report in decoded)
    engine_s = sum(float(np.mean(report.engine_busy_s)) for report in decoded if isinstance(report, RolloutReport))
    period_s = sum(report.period_s for report in decoded if isinstance(report, RolloutReport))
    score_s = seconds.get("score", 0.0)

    def other(train_s: float) -> float:
        return max(0.0, wall_s - (max(train_s, decode_s) if overlaps else train_s + decode_s))

    metrics = {f"time/{verb}": spent_s for verb, spent_s in seconds.items()}
    metrics |= {"time/step": wall_s, "time/other": other(update_s + score_s)}
    if wall_s > 0:
        metrics |= {
            "other_share": other(update_s + score_s) / wall_s,
            "other_share_with_score": other(update_s) / wall_s,
            "engine/utilization": engine_s / wall_s,
        }
    if overlaps and period_s > 0:
        metrics["engine/utilization"] = engine_s / period_s
    return metrics
