"""Checks that end a run: failing verifiers, stale rollouts, too few prompts, no kept groups, impossible resumes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from or1_megatron.config.schema import StageConfig
from or1_megatron.types import AdvantagedGroup, Group
from or1_verify.errors import UserError


class VerificationFailing(UserError, RuntimeError):
    """The verifier failed on so many responses that their rewards of 0 would teach the wrong thing."""


class StaleRollout(UserError, RuntimeError):
    """A response has tokens from weights that are older than ``max_staleness`` allows, too new, or unknown."""


class ResumeError(UserError, ValueError):
    """The present configuration, or this version of the program, cannot continue a checkpoint."""


class NoPromptsLeft(UserError, ValueError):
    """A stage's filters leave fewer prompts than one of its steps takes."""


class AllRejected(UserError, RuntimeError):
    """No group was kept in too many rollout steps in a row."""


def check_state(state: Mapping[str, Any], expected: Collection[str]) -> None:
    """Raise ResumeError when an older version wrote the loop's ``state``, and this version cannot use it.

    The state then lacks an ``expected`` key, or holds prompts that the older version left to later steps.
    """
    if missing := [name for name in expected if name not in state]:
        step = state.get("steps_done", "unknown")
        raise ResumeError(
            f"the checkpoint of step {step} was written by an older version: its loop.json lacks {', '.join(missing)}. "
            "Its weights can be used all the same: or1 convert megatron-to-hf, and a new run from there"
        )
    if deferred := [*state.get("deferred", ()), *state.get("not_asked", ())]:
        raise ResumeError(
            f"the checkpoint of step {state['steps_done']} holds {len(deferred)} prompts that rollout.tail=defer left "
            "to later steps, and this version defers none: finish the stage with the version that wrote the checkpoint"
        )


def check_stage_over(stage: StageConfig, end: str, steps: int) -> None:
    """Raise ResumeError when a stage that ended after all its ``steps`` now has another number of steps."""
    if end == "steps" and steps != stage.steps:
        raise ResumeError(
            f"stage '{stage.name}' ended after {steps} steps, and its steps are now {stage.steps}; put {steps} back, "
            "or start a new run with another run.dir"
        )


def check_stage_steps(stage: StageConfig, done: int) -> None:
    """Raise ResumeError when more steps of the current stage are ``done`` than it is now configured with."""
    if done > stage.steps:
        raise ResumeError(
            f"the newest checkpoint is of step {done} of stage '{stage.name}', whose steps are now {stage.steps}; give "
            f"it at least {done} (with exactly {done} it ends there), or start a new run with another run.dir"
        )


def check_prompts(stage: StageConfig, dropped: int, left: int) -> None:
    """Raise NoPromptsLeft when fewer than D_R different prompts are left at the start of ``stage``."""
    if left < stage.prompts_per_step:
        raise NoPromptsLeft(
            f"stage '{stage.name}': its filters drop {dropped} prompts by their pass rates in the previous stage, "
            f"which leaves {left}, fewer than prompts_per_step = {stage.prompts_per_step}; loosen filter_solved (now "
            f"{str(stage.filter_solved).lower()}), min_pass_rate (now {stage.min_pass_rate:g}) or max_pass_rate (now "
            f"{stage.max_pass_rate:g}), lower prompts_per_step, or give harder data"
        )


def check_rejected(rejected: Sequence[AdvantagedGroup], in_a_row: int, limit: int) -> None:
    """Raise AllRejected when ``in_a_row`` steps without a kept group reach ``limit``.

    ``rejected``: the rejected groups of the last step, for the message.
    """
    if in_a_row >= limit:
        right, wrong, other = count_rejected(rejected)
        reasons = frequent_reasons(verdict for group in rejected for verdict in group.group.verdicts) or "none"
        raise AllRejected(
            f"every group was rejected in {in_a_row} rollout steps in a row (safety.max_rejected_in_a_row = {limit}): "
            f"of the last step's {len(rejected)}, {right} were all right, {wrong} all wrong, {other} left without "
            f"spread by the truncation mask. Rewards of 0: {reasons}. The policy learns nothing from them. All wrong: "
            "give easier problems or a longer max_response_tokens; all right: give harder problems; either: a larger "
            "group_size; or raise the limit. The same command resumes from the last checkpoint"
        )


def frequent_reasons(verdicts: Iterable[Any]) -> str:
    """Return in words the three most frequent reasons for rewards of 0, with their counts.

    ``verdicts``: Verdicts, or other records with ``status``, ``detail`` and ``reward``.
    """
    lost = Counter((it.status, re.sub(r"\d+", "#", it.detail)[:100]) for it in verdicts if it.reward <= 0)
    return "; ".join(
        f"{count} {status}" + f" ({detail})" * bool(detail) for (status, detail), count in lost.most_common(3)
    )


def count_rejected(rejected: Sequence[AdvantagedGroup]) -> tuple[int, int, int]:
    """Return three numbers of rejected groups: (all right, all wrong, mixed).

    A mixed group is rejected only when a truncation mask leaves its rewards without spread.
    """
    right = sum(bool(group.group.right.all()) for group in rejected)
    wrong = sum(not group.group.right.any() for group in rejected)
    return right, wrong, len(rejected) - right - wrong


def check_verdicts(groups: Sequence[Group], max_error_fraction: float) -> None:
    """Raise VerificationFailing if too many verdicts are ``error`` or ``timeout``.

    At most ``max_error_fraction`` of them may be ``error``, and at most half ``timeout``, which responses can cause.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    limits = {"error": (max_error_fraction, "verify.max_error_fraction"), "timeout": (0.5, "see verify.timeout_s")}
    for status, (tolerated, key) in limits.items():
        failed = [verdict for verdict in verdicts if verdict.status == status]
        if len(failed) > tolerated * len(verdicts):
            raise VerificationFailing(
                f"the verifier's verdict is '{status}' on {len(failed)} of {len(verdicts)} responses, more than the "
                f"tolerated share of {tolerated:g} ({key}); the first: {failed[0].detail or 'no detail'}"
            )


def check_versions(groups: Sequence[Group], version: int, max_staleness: int = 0) -> int:
    """Return the age of the oldest sampled token: the policy's ``version`` minus the version that sampled the token.

    Raises StaleRollout when the age exceeds ``max_staleness``, or a token is from newer or unknown weights.
    """
    oldest = version
    for group in groups:
        for completion in group.completions:
            versions = [span.version for span in completion.versions]
            if not versions or any(not version - max_staleness <= sampled <= version for sampled in versions):
                expected = f"{version - max_staleness} to {version}" if max_staleness else f"{version}"
                raise StaleRollout(
                    f"problem {completion.problem_id}, sample {completion.sample_index}: engine {completion.engine} "
                    f"sampled it from weights version {versions or 'unknown'}, expected {expected}"
                )
            oldest = min(oldest, *versions)
    return version - oldest
