"""What is taken off a response's reward before advantages: DAPO's soft penalty on length, and KL to the reference.

Metrics and pass rates are of the rewards themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from or1_megatron.config.schema import AlgorithmConfig, StageConfig
from or1_megatron.interfaces import Policy
from or1_megatron.rl.batch import check_log_probs, pack, to_samples
from or1_megatron.rl.objectives.estimators import kl_estimate
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import AdvantagedGroup, Float32Array, Group


def reward_penalties(
    policy: Policy, groups: Sequence[Group], stage: StageConfig, algorithm: AlgorithmConfig, layout: BatchLayout
) -> list[NDArray[np.float64]] | None:
    """Return the penalties [M] of each group; None: nothing is penalised.

    With ``kl.where`` reward the reference scores all responses of the step.
    """
    advantage, kl = algorithm.advantage, algorithm.kl
    if advantage.overlong_tokens is None and kl.where == "loss":
        return None
    penalties = [np.zeros(len(group.completions)) for group in groups]
    if advantage.overlong_tokens is not None:
        lengths = [np.array([completion.token_ids.size for completion in group.completions]) for group in groups]
        most, soft = stage.max_response_tokens, advantage.overlong_tokens
        penalties = [advantage.overlong_penalty * overlong(each, most, soft) for each in lengths]
    if kl.where == "reward":
        found = iter(_kl_of_responses(policy, groups, stage, algorithm, layout))
        penalties = [p + kl.coefficient * np.array([next(found) for _ in p]) for p in penalties]
    return penalties


def overlong(lengths: NDArray[np.int64], longest: int, soft: int) -> NDArray[np.float64]:
    """Return the share of DAPO's soft penalty that a response gets, 0 to 1 (arXiv 2503.14476, eq. 13). [M] -> [M].

    0 up to ``longest`` - ``soft`` tokens, then linear, 1 at ``longest``. Worked example, longest 20, soft 4: lengths
    16, 17, 20 give 0, 1/4, 1.
    """
    return np.clip((lengths - (longest - soft)) / soft, 0.0, 1.0)


def _kl_of_responses(
    policy: Policy, groups: Sequence[Group], stage: StageConfig, algorithm: AlgorithmConfig, layout: BatchLayout
) -> Iterator[float]:
    """Yield the estimate of KL(engine || reference), summed over each response's tokens."""
    unrated = [AdvantagedGroup(group, np.zeros(len(group.completions), dtype=np.float32)) for group in groups]
    samples = [sample for group in unrated for sample in to_samples(group)]
    of_reference = policy.score_reference(pack(samples, layout), stage.temperature).log_probs
    check_log_probs(samples, of_reference)
    for sample, found in zip(samples, of_reference, strict=True):
        assert sample.engine_log_probs is not None
        sampled, reference = (_double(values) for values in (sample.engine_log_probs, found))
        yield float(kl_estimate(sampled, reference, algorithm.kl.estimator, algorithm.kl.cap).sum())


def _double(values: Float32Array) -> torch.Tensor:
    return torch.from_numpy(values).double()
