"""avg@k on held-out problems, with the training engines and verifiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from or1_megatron.interfaces import Rollouts
from or1_megatron.rl.checks import check_verdicts
from or1_megatron.types import EvaluationResult, Group, Prompt, RolloutReport, Sampling


class HeldOut:
    """Implements ``interfaces.Evaluator``. Its seed is its own and always the same, so that the same weights are judged
    alike at every call, and the training stream is not touched."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rollouts: Rollouts,
        sampling: Sampling,
        seed: int,
        max_error_fraction: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``sampling``: at the final stage's T, whatever stage training is in. ValueError without prompts."""
        if not prompts:
            raise ValueError("evaluate: no held-out problem is left; evaluate.data must name at least one")
        self._prompts = tuple(prompts)
        self._rollouts = rollouts
        self._sampling = sampling
        self._seed = seed
        self._max_error_fraction = max_error_fraction
        self._clock = clock

    def evaluate(self, samples: int) -> EvaluationResult:
        """avg@``samples``; raises what the roll-out raises, and VerificationFailing."""
        started_s = self._clock()
        self._rollouts.roll_out(self._prompts, samples, self._sampling, self._seed)
        self._rollouts.wait_decoded()
        groups, report = self._rollouts.collect()
        check_verdicts(groups, self._max_error_fraction)
        return summarise(groups, report, self._clock() - started_s)


def summarise(groups: Sequence[Group], report: RolloutReport, wall_s: float) -> EvaluationResult:
    """The result of one evaluation roll-out; a verdict that failed counts as wrong."""
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    truncated = np.concatenate([group.truncated for group in groups])
    lengths = np.array([completion.token_ids.size for group in groups for completion in group.completions])
    return EvaluationResult(
        accuracy=float(rewards.mean()),
        non_truncated_accuracy=None if truncated.all() else float(rewards[~truncated].mean()),
        truncation_ratio=float(truncated.mean()),
        mean_length_tokens=float(lengths.mean()),
        problems=len(groups),
        samples=len(groups[0].completions),
        decode_s=report.decode_s,
        wall_s=wall_s,
    )
