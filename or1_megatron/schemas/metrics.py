"""The list of all metrics of a run, with units and meanings; ``rl.metrics`` computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from or1_verify.types import VerdictStatus


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, a field of metrics.jsonl. ``unit`` is "" for a metric without a unit."""

    name: str
    unit: str
    meaning: str


VERBS: Mapping[str, str] = {
    "begin_stage": "stage boundary: mixture, filters, restarts",
    "take_problems": "draw the step's prompts",
    "roll_out": "sample until the last response is decoded",
    "verify": "wait for the remaining verdicts",
    "sample_ahead": "start later steps' rollouts that waited for a refill (rollout.max_staleness only)",
    "observe": "record pass rates",
    "assign_advantages": "group advantages",
    "reject": "drop groups without advantage",
    "score": "forward passes before the update, where needed: pi_k's log-probs, reference",
    "read_entropy": "estimate e_k, and derive the step's coefficients from it",
    "batch": "pack the samples",
    "update": "SGD steps",
    "control_entropy": "move the entropy coefficient",
    "hand_off": "send the weights to the engines, with probe",
    "evaluate": "held-out accuracy",
    "measure": "compute the metrics, alarms and the stage's plateau",
    "report": "record metrics and rollouts",
    "save": "checkpoint: copy the state; wait for an earlier write that is not complete",
    "export": "HF folder",
}
"""The verbs of the loop in their order; each is a method of ``rl.loop.Loop`` and a metric ``time/<verb>``."""

ALARMS: Mapping[str, str] = {
    "grad_norm": "gradient norm far above its running median",
    "mismatch": "engine's and policy's log-probs differ more than their dtype explains",
    "entropy": "entropy near zero while there is still something to learn",
    "non_truncated": "training accuracy rises while that of non-truncated responses falls",
    "plateau": "training accuracy stands still early in the first stage",
    "rejected": "no group was kept, so that nothing was trained",
}
"""Every alarm of ``rl.alarms`` and its meaning; each is a metric ``alarm/<name>``."""

FAULTS: Mapping[str, str] = {
    "stalled": "processes that were killed because they gave no sign of life",
    "restarts": "times that the ranks were started again",
    "engines": "engines that were replaced",
    "managers": "RolloutManagers that were replaced",
}
"""Counts of faults in ``faults.jsonl`` and their meanings; each is a metric ``faults/<name>``."""

ANY_SET = "<set>"
"""Placeholder for a held-out set's name in the names of metrics."""

_EVALUATED = (
    Metric("accuracy", "fraction", "avg@k on held-out problems, with the weights after this step"),
    Metric("non_truncated_accuracy", "fraction", "the same over responses that were not truncated"),
    Metric("truncation_ratio", "fraction", "held-out responses that were truncated"),
    Metric("mean_length", "tokens", "mean length of the held-out responses"),
    Metric("entropy", "nats/token", "as entropy/sampled, of the held-out responses; not with temperature 0"),
    Metric("samples", "responses", "k: responses per held-out problem"),
    Metric("pass@<k>", "fraction", "chance that one of k responses is right, without bias; k = 2, 4, ..."),
    Metric("best@<k>", "reward", "mean highest reward of k, where rewards are not only 1 and 0"),
    Metric("source/<source>/accuracy", "fraction", "of problems of one data source, if there are several"),
)
"""Metrics of an evaluation, named ``evaluation/<name>``, and with several sets also ``evaluation/<set>/<name>``."""

_STATUSES: Mapping[str, str] = {
    "right": "right",
    "wrong": "wrong",
    "truncated": "cut off at T",
    "no_answer": "without an answer",
    "unreadable": "that differ from a gold that cannot be read",
    "timeout": "on which the verifier ran out of time",
    "error": "on which the verifier failed",
}
assert set(_STATUSES) == set(get_args(VerdictStatus))

METRICS: tuple[Metric, ...] = (
    Metric("stage/index", "", "stage of the step, from 0"),
    Metric("stage/max_response_tokens", "tokens", "T of the stage"),
    Metric("reward/mean", "reward", "mean reward over all responses of the step, rejected groups included"),
    Metric("reward/std", "reward", "standard deviation of these rewards"),
    Metric("reward/min", "reward", "lowest of them"),
    Metric("reward/max", "reward", "highest of them"),
    Metric("accuracy/all", "fraction", "responses that are right"),
    Metric("accuracy/non_truncated", "fraction", "right ones among the responses that were not truncated"),
    Metric("truncation/ratio", "fraction", "responses cut off at T; the paper's clip_ratio"),
    Metric("length/mean", "tokens", "mean response length"),
    Metric("length/p50", "tokens", "median response length"),
    Metric("length/p95", "tokens", "95th percentile of the response length (linear interpolation)"),
    Metric("length/p99", "tokens", "99th percentile of the response length (linear interpolation)"),
    Metric("length/max", "tokens", "longest response"),
    Metric("entropy/sampled", "nats/token", "minus the mean engine log-prob of the sampled tokens, all responses"),
    Metric(
        "entropy/estimate", "nats/token", "e_k, the controllers' input: entropy/sampled unless configured otherwise"
    ),
    Metric("entropy/full", "nats/token", "full-vocabulary entropy, mean over the tokens of the update"),
    Metric("entropy/coefficient", "", "alpha_k, the entropy coefficient of the step's updates"),
    Metric("entropy/controller", "", "c_k, the controller's value behind alpha_k"),
    Metric(
        "loss", "per token", "the objective, aggregated as configured; mean over the SGD steps weighted by their tokens"
    ),
    Metric("policy/loss", "per token", "the objective without its entropy bonus"),
    Metric("policy/ratio", "", "mean importance ratio rho; 1 by construction when on-policy"),
    Metric("policy/ratio_max", "", "largest rho of a token; of a response with gspo"),
    Metric("policy/ratio_min", "", "smallest rho of a token; of a response with gspo"),
    Metric(
        "policy/clip_fraction",
        "fraction",
        "tokens whose clipped term was the smaller (cispo: whose ratio was cut): low and high together",
    ),
    Metric("policy/clip_fraction_low", "fraction", "of these, below 1 - clip_low (but with cispo A < 0)"),
    Metric("policy/clip_fraction_high", "fraction", "of these, above 1 + clip_high (but with cispo A > 0)"),
    Metric("policy/clip_fraction_dual", "fraction", "tokens held at dual_clip * A (A < 0); 0 without dual clip"),
    Metric("policy/kl", "nats/token", "estimate of KL(policy || reference) by kl.estimator; only with a reference"),
    Metric("correction/weight", "", "mean importance weight pi_k / pi_engine after the cut; only with a correction"),
    Metric("correction/weight_max", "", "largest of these weights"),
    Metric("correction/cut_fraction", "fraction", "tokens whose weight was truncated or masked"),
    Metric("correction/effective_sample_size", "fraction", "(sum w)^2 over n sum w^2 of the n tokens, after the cut"),
    Metric(
        "routing/rerouted",
        "fraction",
        "tokens x layers with experts that the policy would have sent to other experts (rollout.router_replay)",
    ),
    Metric("routing/bytes", "bytes", "of the experts that came with this step's responses (rollout.router_replay)"),
    Metric("policy/approx_kl", "nats/token", "k3 estimate of KL(sampling policy || policy); 0 when on-policy"),
    Metric("policy/grad_norm", "", "gradient norm before clipping, mean over the SGD steps that were not skipped"),
    Metric("policy/learning_rate", "", "of the step's last SGD step"),
    Metric("sgd/steps", "steps", "SGD steps tried in this rollout step; 0 when every group was rejected"),
    Metric("sgd/skipped", "steps", "SGD steps skipped because loss or gradient was not finite"),
    Metric("sgd/skipped_in_a_row", "steps", "SGD steps skipped in a row up to the end of this rollout step"),
    Metric("sgd/response_tokens", "tokens", "T_k summed over the SGD steps"),
    Metric("groups/kept", "groups", "groups that entered the batch"),
    Metric("groups/rejected", "groups", "groups whose advantages were all zero"),
    Metric("groups/rejected_all_right", "groups", "rejected, every response right"),
    Metric("groups/rejected_all_wrong", "groups", "rejected, every response wrong"),
    Metric("groups/rejected_other", "groups", "rejected though mixed: no spread was left by a mask"),
    Metric("groups/steps_rejected_in_a_row", "steps", "rollout steps in a row, up to this one, without a kept group"),
    Metric("refill/prompts", "prompts", "drawn beyond D_R until D_R groups were kept"),
    Metric("refill/missing", "groups", "still missing to D_R after refill_prompts were used up"),
    Metric("refill/surplus_responses", "responses", "started early, not needed, and thrown away"),
    Metric(
        "mismatch/mean_abs", "nats", "mean |engine - policy| log-prob of the sampled tokens, before the first update"
    ),
    Metric("mismatch/max_abs", "nats", "largest |engine - policy| log-prob of a sampled token"),
    Metric("mismatch/kl", "nats/token", "k3 estimate of KL(engine || policy)"),
    Metric(
        "mismatch/k1",
        "nats/token",
        "k1 estimate of KL(engine || policy): mean of log engine - log policy; like those below it is also reported of "
        "stale rollouts, where it holds what the policy has moved since they were sampled",
    ),
    Metric("mismatch/perplexity_ratio", "", "a response's perplexity by the policy over that by the engine, mean"),
    Metric("mismatch/chi_square", "", "mean w^2 - 1, w = policy / engine of a sampled token"),
    Metric("mismatch/sequence_chi_square", "", "mean W^2 - 1 over the responses, W the product of w over a response"),
    Metric("handoff/probe_max_abs_diff", "nats", "largest |engine - policy| log-prob on the fixed probe"),
    Metric("handoff/probe_mean_abs_diff", "nats", "mean |engine - policy| log-prob on it, of the worst engine"),
    Metric("handoff/bytes", "bytes", "sent by rank 0"),
    Metric("handoff/transfer_s", "s", "of the handoff, the transfer"),
    Metric("handoff/probe_s", "s", "of the handoff, the probe"),
    *(Metric(f"verify/{status}", "responses", f"responses {text}") for status, text in _STATUSES.items()),
    Metric("verify/tail_s", "s", "from the last decoded response to the last verdict"),
    Metric("verify/retries", "verdicts", "verdicts that were tried again"),
    Metric("rollout/staleness", "versions", "by which the oldest sampled token is behind the weights that it trains"),
    Metric(
        "rollout/entropy", "nats/token", "of the engines' whole distributions, mean over the tokens of all responses"
    ),
    Metric("rollout/response_tokens", "tokens", "of the responses of this step"),
    Metric("speculation/acceptance", "fraction", "drafted tokens that were sampled; only where engines draft"),
    Metric(
        "speculation/tokens_per_pass",
        "tokens",
        "a response's tokens over the model's passes for them, of responses of one version; 1 without drafts",
    ),
    Metric("rollout/tokens_per_s", "tokens/s", "response tokens over the time during which an engine was decoding"),
    Metric(
        "engine/utilization", "fraction", "share of the step's wall time in which an engine decodes, mean over engines"
    ),
    Metric("engine/balance", "fraction", "an engine's decoding time over that of the busiest, mean over engines"),
    Metric("train/tokens_per_s", "tokens/s", "prompt and response tokens over forward, backward and optimizer time"),
    Metric("train/tokens_per_s_per_gpu", "tokens/s", "the same per trainer GPU; only on GPUs"),
    Metric("train/mfu", "fraction", "6 * parameters * tokens over the GPUs' peak in that time; only on GPUs"),
    *(Metric(f"alarm/{name}", "", f"1 while the alarm lasts, else 0: {text}") for name, text in ALARMS.items()),
    Metric("filter/solved", "problems", "dropped at the start of this stage: solved in the previous one"),
    Metric("filter/outside", "problems", "also dropped there: pass rate outside [min, max]_pass_rate"),
    Metric("filter/left", "problems", "left after the filters"),
    *(replace(metric, name=f"evaluation/{metric.name}") for metric in _EVALUATED),
    *(
        Metric(f"evaluation/{ANY_SET}/{name}", unit, f"{name} of one held-out set, where there are several")
        for name, unit in ((metric.name, metric.unit) for metric in _EVALUATED)
    ),
    *(
        Metric(f"faults/{name}", "", f"{text}, since the run began; only after a first fault")
        for name, text in FAULTS.items()
    ),
    Metric("memory/host", "bytes", "in use on rank 0's machine or, if less may be used, in its cgroup"),
    Metric("memory/gpu", "bytes", "the most that torch held on rank 0's GPU in the step; only on GPUs"),
    Metric("checkpoint/write_s", "s", "writing a checkpoint to disk during training; in the row after it was complete"),
    *(Metric(f"time/{verb}", "s", text) for verb, text in VERBS.items()),
    Metric(
        "time/step", "s", "wall time since the previous row; the verbs' times add up to it (save: of the step before)"
    ),
    Metric("time/other", "s", "time/step in which no engine decodes and no forward, backward or optimizer step runs"),
    Metric("other_share", "fraction", "time/other over time/step; time/score counts as forward"),
    Metric("other_share_with_score", "fraction", "the same with time/score counted as other, as in the paper's t_O"),
)


def is_metric(name: str, sets: Sequence[str]) -> bool:
    """Return whether a run with held-out sets of these names may have a metric ``name``."""
    known = {metric.name for metric in METRICS}
    of_set = {metric.replace(ANY_SET, title) for metric in known if ANY_SET in metric for title in sets}
    return "<" not in name and (name in known or (len(sets) > 1 and name in of_set))
