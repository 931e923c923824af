"""What must hold of a roll-out before it may train the policy."""

from __future__ import annotations

from collections.abc import Sequence

from or1_megatron.types import Group


class VerificationFailing(RuntimeError):
    """The verifier fails on so many responses that their rewards of 0 would teach the wrong thing."""


class StaleRollout(RuntimeError):
    """A response was sampled, in part or whole, from other weights than those about to be updated."""


class PastTheEnd(ValueError):
    """The run to be resumed has done more steps than its stages now have."""


def check_steps(done: int, total: int) -> None:
    """Raise PastTheEnd when a checkpoint is of a later step than the schedule's last."""
    if done > total:
        raise PastTheEnd(
            f"the newest checkpoint is of step {done}, but the stages now have {total} steps in all; "
            f"give stages.*.steps at least {done}, or start a new run with another run.dir"
        )


def check_verdicts(groups: Sequence[Group], max_error_fraction: float) -> None:
    """Raise VerificationFailing when the share of verdicts ``error`` is above ``max_error_fraction``.

    Other statuses, time-outs too, say something of the response, and are not held against the verifier.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    errors = [verdict for verdict in verdicts if verdict.status == "error"]
    if len(errors) > max_error_fraction * len(verdicts):
        raise VerificationFailing(
            f"the verifier failed on {len(errors)} of {len(verdicts)} responses, more than the tolerated share of "
            f"{max_error_fraction:g} (verify.max_error_fraction); the first error: {errors[0].detail or 'no detail'}"
        )


def check_versions(groups: Sequence[Group], version: int) -> None:
    """Raise StaleRollout unless every token was sampled from weights ``version``: the loop is on-policy."""
    for group in groups:
        for completion in group.completions:
            versions = [span.version for span in completion.versions]
            if not versions or any(found != version for found in versions):
                raise StaleRollout(
                    f"problem {completion.problem_id}, sample {completion.sample_index}: engine {completion.engine} "
                    f"sampled it from weights version {versions or 'unknown'}, expected {version}"
                )
