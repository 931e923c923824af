"""Forward passes before the update: log-probs of the kept responses by the policy pi_k and by the frozen reference.

A pass is made only when needed. With the recipe's defaults and N_SGD = 1 a step makes none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from or1_megatron.config.schema import AlgorithmConfig, StageConfig
from or1_megatron.interfaces import Policy
from or1_megatron.rl.batch import check_log_probs, pack, to_samples
from or1_megatron.rl.mismatch import mismatch_metrics
from or1_megatron.rl.objectives.policy_gradient import old_is_the_policy
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import AdvantagedGroup, Sample, TokenScores, UpdateReport
from or1_verify.errors import UserError

JUDGED: Final = 16
"""Largest number of responses that ``check_mismatch`` scores."""


class MismatchTooLarge(UserError, RuntimeError):
    """Engine and policy differ by more than rounding explains (``safety.mismatch_limit: stop``)."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The kept groups as samples with log-probs, and the policy's scores of these samples."""

    samples: list[list[Sample]]
    of_kept: TokenScores | None = None
    """The policy's scores of ``samples`` at the step's start; None: the policy did not score them."""


def score(
    policy: Policy,
    kept: Sequence[AdvantagedGroup],
    stage: StageConfig,
    algorithm: AlgorithmConfig,
    layout: BatchLayout,
    stale: bool = False,
) -> Scored:
    """Return the kept groups as samples, with log-probs by pi_k if rho needs them and by the reference if there is one.

    rho needs pi_k's log-probs if N_SGD > 1 and ``old_is_the_policy`` is true. With N_SGD = 1 and ``old_is_the_policy``,
    rho is 1. ``stale``: weights older than the policy's drew samples.
    """
    groups = [to_samples(group) for group in kept]
    samples = [sample for group in groups for sample in group]
    of_kept = None
    if samples and stage.sgd_steps > 1 and old_is_the_policy(algorithm, stale):
        of_kept = policy.score(pack(samples, layout), stage.temperature)
        check_log_probs(samples, of_kept.log_probs)
        samples = [replace(s, policy_log_probs=own) for s, own in zip(samples, of_kept.log_probs, strict=True)]
    if algorithm.kl.reference is not None and samples:
        of_reference = policy.score_reference(pack(samples, layout), stage.temperature).log_probs
        check_log_probs(samples, of_reference)
        samples = [replace(s, reference_log_probs=scored) for s, scored in zip(samples, of_reference, strict=True)]
    left = iter(samples)
    return Scored([[next(left) for _ in group] for group in groups], of_kept)


def check_mismatch(
    policy: Policy, kept: Sequence[AdvantagedGroup], stage: StageConfig, layout: BatchLayout, version: int, limit: float
) -> None:
    """Compare log-probs of policy and engines; at most JUDGED responses, all whose tokens are of weights ``version``.

    Raises:
        MismatchTooLarge: the mean |engine - policy| log-prob, in nats, is above ``limit`` or not finite.
    """
    pairs = [(s, c) for group in kept for s, c in zip(to_samples(group), group.group.completions, strict=True)]
    fresh = [(s, c) for s, c in pairs if all(span.version == version for span in c.versions)][:JUDGED]
    if fresh:
        own = policy.score(pack([sample for sample, _ in fresh], layout), stage.temperature).log_probs
        found = mismatch_metrics([completion.log_probs for _, completion in fresh], own)
        if not (mean := found.get("mismatch/mean_abs", math.nan)) <= limit:
            raise MismatchTooLarge(
                f"step {version + 1}: engines and policy differ by {mean:.3g} nats per token on average; {limit:.3g} "
                "would be rounding (safety.mismatch_mean, or 3 times the handoff's probe). safety.mismatch_limit is "
                "stop: nothing was trained on these responses. `or1 doctor mismatch RUN` looks for the cause"
            )


def first_scores(scored: Scored, updates: Sequence[UpdateReport]) -> TokenScores | None:
    """Return, for each sample in order, the first scores that the policy gave it in this step; None if not recorded.

    The scores are from the pass before the updates, or else from the first SGD step that trained on the sample.
    """
    if scored.of_kept is not None:
        return scored.of_kept
    wanted = sum(
        len(group) for group in scored.samples
    )  # the first mini-batches' samples, in order; reuse repeats them
    of_updates = [update.scores for update in updates if update.scores is not None]
    log_probs = tuple(values for scores in of_updates for values in scores.log_probs)[:wanted]
    entropies = tuple(values for scores in of_updates for values in scores.entropies)[:wanted]
    return TokenScores(log_probs, entropies) if log_probs else None
