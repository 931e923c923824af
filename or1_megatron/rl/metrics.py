"""Every metric of a run: one table of names, units and meanings, and the pure functions that compute them.

A metric that a step cannot give (no truncated-free response, no SGD step, no evaluation due) is left out of its row;
it is never a NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from or1_megatron.config import StageConfig
from or1_megatron.rl.alarms import ALARMS
from or1_megatron.rl.batch import real_tokens
from or1_megatron.rl.entropy import EntropyReading
from or1_megatron.types import (
    AdvantagedGroup,
    Batch,
    EvaluationResult,
    Float32Array,
    Group,
    HandoffReport,
    RolloutReport,
    Sample,
    UpdateReport,
    VerdictStatus,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of metrics.jsonl. ``unit`` is "" for what has none."""

    name: str
    unit: str
    meaning: str


VERBS: Mapping[str, str] = {
    "begin_stage": "stage boundary: mixture, filters, and what begins afresh",
    "take_problems": "draw the step's prompts",
    "roll_out": "sample until the last response is decoded",
    "verify": "wait for the verdicts that are still out",
    "sample_ahead": "begin with the next step's roll-out (rollout.max_staleness only)",
    "observe": "record pass rates",
    "assign_advantages": "group advantages",
    "reject": "drop groups without advantage",
    "score": "forward passes before the update: old log-probs, full entropy, reference; where asked for",
    "read_entropy": "the rollout buffer's entropy and the coefficients from it",
    "batch": "pack the samples",
    "update": "SGD steps",
    "control_entropy": "move the entropy coefficient",
    "finish_ahead": "wait for the next step's roll-out (rollout.max_staleness only)",
    "hand_off": "weights to the engines, with probe",
    "evaluate": "held-out accuracy",
    "measure": "compute the metrics, and see whether the stage has converged",
    "report": "record metrics and rollouts",
    "save": "checkpoint: copy the state; wait for the write before, if it still runs",
    "export": "HF folder",
}
"""The verbs of the loop in their order: a method, a timer and a metric ``time/<verb>`` each."""

ANY_SET = "<set>"
"""Stands for a held-out set's name in the names of metrics."""

_OF_A_SET: Mapping[str, str] = {
    "accuracy": "fraction",
    "non_truncated_accuracy": "fraction",
    "truncation_ratio": "fraction",
    "mean_length": "tokens",
    "samples": "responses",
}

_STATUSES: Mapping[str, str] = {
    "right": "right",
    "wrong": "wrong",
    "truncated": "cut off at T",
    "no_answer": "without an answer",
    "timeout": "on which the verifier ran out of time",
    "error": "on which the verifier failed",
}
assert set(_STATUSES) == set(get_args(VerdictStatus))

METRICS: tuple[Metric, ...] = (
    Metric("stage/index", "", "stage of the step, from 0"),
    Metric("stage/max_response_tokens", "tokens", "T of the stage"),
    Metric("reward/mean", "reward", "mean reward over all responses of the step, rejected groups included"),
    Metric("accuracy/all", "fraction", "responses that are right"),
    Metric("accuracy/non_truncated", "fraction", "right ones among the responses that were not truncated"),
    Metric("truncation/ratio", "fraction", "responses cut off at T"),
    Metric("length/mean", "tokens", "mean response length"),
    Metric("length/p50", "tokens", "median response length"),
    Metric("length/p95", "tokens", "95th percentile of the response length (linear interpolation)"),
    Metric("length/p99", "tokens", "99th percentile of the response length (linear interpolation)"),
    Metric("length/max", "tokens", "longest response"),
    Metric("entropy/sampled", "nats/token", "minus the mean log-prob of sampled tokens, engines', all responses"),
    Metric("entropy/estimate", "nats/token", "e_k, which the controllers see: entropy/sampled unless set otherwise"),
    Metric("entropy/full", "nats/token", "full-vocabulary entropy, mean over the tokens of the update"),
    Metric("entropy/coefficient", "", "alpha_k, the entropy coefficient that the step's updates used"),
    Metric("entropy/controller", "", "c_k, the controller's value behind alpha_k"),
    Metric("loss", "per token", "the objective, aggregated as configured, mean over the step's SGD steps"),
    Metric("policy/loss", "per token", "the objective without its entropy bonus"),
    Metric("policy/ratio", "", "mean importance ratio rho; 1 by construction when on-policy"),
    Metric("policy/ratio_max", "", "largest rho of a token"),
    Metric("policy/ratio_min", "", "smallest rho of a token"),
    Metric("policy/clip_fraction", "fraction", "tokens whose clipped term was the smaller: low and high together"),
    Metric("policy/clip_fraction_low", "fraction", "of these, at 1 - clip_low (A < 0)"),
    Metric("policy/clip_fraction_high", "fraction", "of these, at 1 + clip_high (A > 0)"),
    Metric("policy/clip_fraction_dual", "fraction", "tokens held at dual_clip * A (A < 0); 0 without dual clip"),
    Metric("policy/clip_high", "", "epsilon_high of the step's updates"),
    Metric("policy/kl", "nats/token", "k3 estimate of KL(policy || reference); only with a reference"),
    Metric("correction/weight", "", "mean importance weight pi_k / pi_engine after the cut; only with a correction"),
    Metric("correction/weight_max", "", "largest of these weights"),
    Metric("correction/cut_fraction", "fraction", "tokens whose weight was truncated or masked"),
    Metric("policy/approx_kl", "nats/token", "k3 estimate of KL(sampling policy || policy); 0 when on-policy"),
    Metric("policy/grad_norm", "", "gradient norm before clipping, mean over the SGD steps that were not skipped"),
    Metric("policy/learning_rate", "", "of the step's last SGD step"),
    Metric("sgd/steps", "steps", "SGD steps tried in this rollout step; 0 when every group was rejected"),
    Metric("sgd/skipped", "steps", "SGD steps left out because loss or gradient was not finite"),
    Metric("sgd/skipped_in_a_row", "steps", "SGD steps skipped in a row up to the end of this rollout step"),
    Metric("sgd/response_tokens", "tokens", "T_k summed over the SGD steps"),
    Metric("groups/kept", "groups", "groups that entered the batch"),
    Metric("groups/rejected", "groups", "groups whose advantages were all zero"),
    Metric("groups/rejected_all_right", "groups", "rejected, every response right"),
    Metric("groups/rejected_all_wrong", "groups", "rejected, every response wrong"),
    Metric("groups/rejected_other", "groups", "rejected though mixed: the truncation mask left no spread"),
    Metric("groups/steps_rejected_in_a_row", "steps", "rollout steps in a row, up to this one, of which none was kept"),
    Metric("refill/prompts", "prompts", "drawn beyond D_R, until D_R groups were kept"),
    Metric("refill/missing", "groups", "that are still missing to D_R with refill_prompts used up"),
    Metric("refill/surplus_responses", "responses", "begun ahead, not needed, and thrown away"),
    Metric(
        "mismatch/mean_abs", "nats", "mean |engine - policy| log-prob of the sampled tokens, before the first update"
    ),
    Metric("mismatch/max_abs", "nats", "largest |engine - policy| log-prob of a sampled token"),
    Metric("mismatch/kl", "nats/token", "k3 estimate of KL(engine || policy)"),
    Metric("handoff/probe_max_abs_diff", "nats", "largest |engine - policy| log-prob on the fixed probe"),
    Metric("handoff/probe_mean_abs_diff", "nats", "mean |engine - policy| log-prob on it, of the worst engine"),
    Metric("handoff/bytes", "bytes", "sent by rank 0"),
    Metric("handoff/transfer_s", "s", "of the handoff, the transfer"),
    Metric("handoff/probe_s", "s", "of the handoff, the probe"),
    *(Metric(f"verify/{status}", "responses", f"responses {text}") for status, text in _STATUSES.items()),
    Metric("verify/tail_s", "s", "from the last decoded response to the last verdict"),
    Metric("verify/retries", "verdicts", "verdicts that had to be tried again"),
    Metric("rollout/staleness", "versions", "by which the oldest sampled token is behind the weights that it trains"),
    Metric("rollout/response_tokens", "tokens", "sampled in this step"),
    Metric("rollout/tokens_per_s", "tokens/s", "response tokens over the time in which an engine was decoding"),
    Metric(
        "engine/utilization", "fraction", "share of the step's wall time in which an engine decodes, mean over engines"
    ),
    Metric("engine/balance", "fraction", "an engine's decoding time over that of any engine, mean over engines"),
    Metric("train/tokens_per_s", "tokens/s", "prompt and response tokens over forward, backward and optimizer time"),
    Metric("train/tokens_per_s_per_gpu", "tokens/s", "the same per trainer GPU; only on GPUs"),
    Metric("train/mfu", "fraction", "6 * parameters * tokens over the GPUs' peak in that time; only on GPUs"),
    *(Metric(f"alarm/{name}", "", f"1 in an episode of it, else 0: {text}") for name, text in ALARMS.items()),
    Metric("filter/solved", "problems", "dropped at the start of this stage: solved in the previous one"),
    Metric("filter/outside", "problems", "dropped there beside them: pass rate outside [min, max]_pass_rate"),
    Metric("filter/left", "problems", "left after that"),
    Metric("evaluation/accuracy", "fraction", "avg@k on held-out problems, weights after this step"),
    Metric("evaluation/non_truncated_accuracy", "fraction", "the same over responses that were not truncated"),
    Metric("evaluation/truncation_ratio", "fraction", "held-out responses that were truncated"),
    Metric("evaluation/mean_length", "tokens", "mean length of the held-out responses"),
    Metric("evaluation/samples", "responses", "k: responses per held-out problem"),
    *(
        Metric(f"evaluation/{ANY_SET}/{name}", unit, f"of one held-out set, where there are several: {name}")
        for name, unit in _OF_A_SET.items()
    ),
    Metric("checkpoint/write_s", "s", "writing a checkpoint beside training; in the row after it was complete"),
    *(Metric(f"time/{verb}", "s", text) for verb, text in VERBS.items()),
    Metric(
        "time/step", "s", "wall time since the previous row; the verbs' times add up to it (save: of the step before)"
    ),
    Metric("time/other", "s", "time/step in which no engine decodes and no forward, backward or optimizer step runs"),
    Metric("other_share", "fraction", "time/other over time/step"),
)


def is_metric(name: str, sets: Sequence[str]) -> bool:
    """Whether a run with these held-out sets may have a metric of that name."""
    known = {metric.name for metric in METRICS}
    of_set = {each.replace(ANY_SET, title) for each in known if ANY_SET in each for title in sets}
    return (name in known and ANY_SET not in name) or (len(sets) > 1 and name in of_set)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What MFU is measured against; given only where the trainer runs on GPUs."""

    gpus: int
    peak_flops_per_gpu: float | None
    """None: not known of this GPU; there is no MFU then."""
    parameters: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """|engine - policy| log-prob over the sampled tokens that are trained on."""

    mean_abs: float
    max_abs: float
    kl: float
    """k3 estimate of KL(engine || policy), mean over tokens."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """What the online filter did at a stage boundary."""

    solved: int
    outside: int
    """Dropped for their pass rate, beside those."""
    left: int


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that happened in one rollout step, as its metrics need it."""

    stage_index: int
    stage: StageConfig
    filtered: Filtered | None
    """None when no filter was due."""
    groups: Sequence[Group]
    kept: Sequence[AdvantagedGroup]
    rejected: Sequence[AdvantagedGroup]
    rollout: RolloutReport
    reading: EntropyReading
    mismatch: Mismatch | None
    """None when no SGD step was made."""
    batches: Sequence[Batch]
    updates: Sequence[UpdateReport]
    handoff: HandoffReport
    staleness: int = 0
    """By how many versions the oldest sampled token was behind the policy."""


def step_metrics(step: Step, hardware: Hardware | None = None) -> dict[str, float]:
    """All metrics of a step but its times and its evaluation."""
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
        "policy/clip_high": step.reading.clip_high,
        "rollout/staleness": step.staleness,
        **update_metrics(step.updates, step.stage.sgd_steps == 1 and step.staleness == 0),
        "handoff/bytes": step.handoff.bytes_sent,
        "handoff/transfer_s": step.handoff.transfer_s,
        "handoff/probe_s": step.handoff.probe_s,
        **throughput_metrics(step.batches, step.updates, hardware),
    }
    if step.handoff.probe_max_abs_diff is not None:
        metrics["handoff/probe_max_abs_diff"] = step.handoff.probe_max_abs_diff
    if step.handoff.probe_mean_abs_diff is not None:
        metrics["handoff/probe_mean_abs_diff"] = step.handoff.probe_mean_abs_diff
    if step.filtered is not None:
        metrics["filter/solved"], metrics["filter/left"] = step.filtered.solved, step.filtered.left
        metrics["filter/outside"] = step.filtered.outside
    if step.mismatch is not None:
        metrics["mismatch/mean_abs"] = step.mismatch.mean_abs
        metrics["mismatch/max_abs"] = step.mismatch.max_abs
        metrics["mismatch/kl"] = step.mismatch.kl
    return metrics


def rollout_metrics(groups: Sequence[Group], report: RolloutReport) -> dict[str, float]:
    """Over all responses, whether or not their group is rejected."""
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    truncated = np.concatenate([group.truncated for group in groups])
    lengths = np.array([completion.token_ids.size for group in groups for completion in group.completions])
    statuses = [verdict.status for group in groups for verdict in group.verdicts]
    metrics: dict[str, float] = {
        "reward/mean": rewards.mean(),
        "accuracy/all": (rewards > 0).mean(),
        "truncation/ratio": truncated.mean(),
        "length/mean": lengths.mean(),
        "length/max": lengths.max(),
        **{f"length/p{q}": np.percentile(lengths, q) for q in (50, 95, 99)},
        **{f"verify/{status}": statuses.count(status) for status in get_args(VerdictStatus)},
        "verify/tail_s": report.verify_tail_s,
        "verify/retries": report.verifier_retries,
        "rollout/response_tokens": report.response_tokens,
    }
    if not truncated.all():
        metrics["accuracy/non_truncated"] = (rewards[~truncated] > 0).mean()
    if report.decode_s > 0:
        metrics["rollout/tokens_per_s"] = report.response_tokens / report.decode_s
        metrics["engine/balance"] = float(np.mean(report.engine_busy_s)) / report.decode_s
    return {name: float(value) for name, value in metrics.items()}


def rejection_metrics(kept: Sequence[AdvantagedGroup], rejected: Sequence[AdvantagedGroup]) -> dict[str, float]:
    all_right = sum(bool((group.group.rewards > 0).all()) for group in rejected)
    all_wrong = sum(not (group.group.rewards > 0).any() for group in rejected)
    return {
        "groups/kept": len(kept),
        "groups/rejected": len(rejected),
        "groups/rejected_all_right": all_right,
        "groups/rejected_all_wrong": all_wrong,
        "groups/rejected_other": len(rejected) - all_right - all_wrong,
    }


def refill_metrics(step: Step) -> dict[str, float]:
    """Nothing in a stage without refill."""
    if step.stage.refill_prompts == 0:
        return {}
    wanted = step.stage.prompts_per_step
    return {
        "refill/prompts": len(step.groups) - wanted,
        "refill/missing": max(0, wanted - len(step.kept)),
        "refill/surplus_responses": step.rollout.surplus_responses,
    }


def update_metrics(updates: Sequence[UpdateReport], on_policy: bool) -> dict[str, float]:
    """Means over all counted tokens of the step's SGD steps; the sums of skipped ones are not finite and stay out."""
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
            "loss": mean["loss"],
            "policy/loss": mean["policy_loss"],
            "policy/ratio": mean["ratio"],
            "policy/ratio_max": max(update.sums["max_ratio"] for update in done),
            "policy/ratio_min": 1.0 / max(update.sums["max_inverse_ratio"] for update in done),
            "policy/clip_fraction": mean["clipped"],
            **{f"policy/clip_fraction_{side}": mean[f"clipped_{side}"] for side in ("low", "high", "dual")},
            # On policy the objective's k3 compares with the engine, and is reported under mismatch.
            "policy/approx_kl": 0.0 if on_policy else mean["approx_kl"],
            "policy/grad_norm": float(np.mean([update.grad_norm for update in done])),
            "policy/learning_rate": done[-1].learning_rate,
            "entropy/full": mean["entropy"],
        }
        if "kl" in mean:
            metrics["policy/kl"] = mean["kl"]
        if "weight" in mean:
            metrics |= {
                "correction/weight": mean["weight"],
                "correction/weight_max": max(update.sums["max_weight"] for update in done),
                "correction/cut_fraction": mean["weight_cut"],
            }
    return metrics


def measured_mismatch(updates: Sequence[UpdateReport]) -> Mismatch | None:
    """On policy: engine against policy, as the one SGD step saw it. None when it was skipped or there was none."""
    done = [update for update in updates if not update.skipped]
    if not done:
        return None
    tokens = sum(update.token_count for update in done)
    return Mismatch(
        mean_abs=sum(update.sums["abs_log_ratio"] for update in done) / tokens,
        max_abs=max(update.sums["max_abs_log_ratio"] for update in done),
        kl=sum(update.sums["approx_kl"] for update in done) / tokens,
    )


def scored_mismatch(samples: Sequence[Sample], policy_log_probs: Sequence[Float32Array]) -> Mismatch:
    """The same from a separate pass: ``samples`` still carry the engines' log-probs. At least one token."""
    engine = np.concatenate([sample.old_log_probs for sample in samples]).astype(np.float64)
    difference = np.concatenate(policy_log_probs).astype(np.float64) - engine
    return Mismatch(
        mean_abs=float(np.abs(difference).mean()),
        max_abs=float(np.abs(difference).max()),
        kl=float((np.expm1(difference) - difference).mean()),
    )


def throughput_metrics(
    batches: Sequence[Batch], updates: Sequence[UpdateReport], hardware: Hardware | None
) -> dict[str, float]:
    """Training speed; nothing when no SGD step was made. MFU leaves attention's own FLOPs out."""
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


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    metrics = {f"evaluation/{name}": value for name, value in _measured(result).items()}
    for title, of_set in result.sets.items():
        metrics |= {f"evaluation/{title}/{name}": value for name, value in _measured(of_set).items()}
    return metrics


def _measured(result: EvaluationResult) -> dict[str, float]:
    metrics = {
        "accuracy": result.accuracy,
        "truncation_ratio": result.truncation_ratio,
        "mean_length": result.mean_length_tokens,
        "samples": result.samples,
    }
    if result.non_truncated_accuracy is not None:
        metrics["non_truncated_accuracy"] = result.non_truncated_accuracy
    return metrics


def time_metrics(
    wall_s: float,
    seconds: Mapping[str, float],
    busy: Sequence[RolloutReport | EvaluationResult | UpdateReport],
    ahead: RolloutReport | None = None,
) -> dict[str, float]:
    """``time/<verb>`` of the verbs that ran, ``time/step``, ``time/other``, ``other_share``, ``engine/utilization``.

    other = wall - (an engine is decoding) - (forward, backward, optimizer); ``busy`` are the reports of this lap that
    say so. A ``score`` pass is a forward pass and counts as such. ``ahead``: which of them was decoded while the policy
    trained; the two begin together, and the shorter is not counted twice.
    """
    useful_s, engine_s = seconds.get("score", 0.0), 0.0
    if ahead is not None:
        updates = [report for report in busy if isinstance(report, UpdateReport)]
        train_s = useful_s + sum(report.forward_backward_s + report.optimizer_s for report in updates)
        useful_s -= min(train_s, ahead.decode_s)
    for report in busy:
        if isinstance(report, UpdateReport):
            useful_s += report.forward_backward_s + report.optimizer_s
        else:
            useful_s += report.decode_s
        if isinstance(report, RolloutReport):
            engine_s += float(np.mean(report.engine_busy_s))
    other_s = max(0.0, wall_s - useful_s)
    metrics = {f"time/{verb}": spent_s for verb, spent_s in seconds.items()}
    metrics |= {"time/step": wall_s, "time/other": other_s}
    if wall_s > 0:
        metrics |= {"other_share": other_s / wall_s, "engine/utilization": engine_s / wall_s}
    return metrics
