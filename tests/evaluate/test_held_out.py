"""avg@k by hand, and that evaluation asks for what it should. It does not prove that a real engine is repeatable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from or1_megatron.evaluate.held_out import HeldOut
from or1_megatron.types import (
    Completion,
    Group,
    Message,
    Problem,
    Prompt,
    RolloutReport,
    Sampling,
    Verdict,
    VersionSpan,
)


def prompt(j: int) -> Prompt:
    row = Problem(f"p{j}", "held-out", "math", (Message("user", str(j)),), '["1"]', {}, f"held_out.jsonl:{j}")
    return Prompt(row, np.array([j], dtype=np.int32))


def response(of: Prompt, sample: int, tokens: int, truncated: bool) -> Completion:
    ids, log_probs = np.zeros(tokens, dtype=np.int32), np.zeros(tokens, dtype=np.float32)
    reason = "length" if truncated else "stop"
    return Completion(of.problem.id, sample, ids, log_probs, "", reason, (VersionSpan(0, 0),), 0, 0, 0.0, 0.0)


class Recorded:
    """Rollouts that play back: sample i of problem j has 2 + i tokens, is right for i < j, truncated for i == 2."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[Prompt], int, Sampling, int]] = []

    def roll_out(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> None:
        self.asked.append((prompts, group_size, sampling, seed))

    def wait_decoded(self) -> None:
        pass

    def collect(self) -> tuple[list[Group], RolloutReport]:
        prompts, size, _, _ = self.asked[-1]
        groups = []
        for j, each in enumerate(prompts):
            completions = tuple(response(each, i, 2 + i, truncated=i == 2) for i in range(size))
            verdicts = tuple(
                Verdict(float(i < j and i != 2), "right" if i < j else "wrong", "", "", 0.0) for i in range(size)
            )
            groups.append(Group(each, completions, verdicts))
        return groups, RolloutReport(1.5, (1.5,), 2.0, 0, 0, 0.0, 0)

    def progress(self) -> tuple[int, int]:
        return (0, 0)


def test_average_at_k() -> None:
    """3 problems x 3 samples: right are (1, 0), (2, 0), (2, 1): 3 of 9; 3 of the 6 that are not truncated; 3 tokens."""
    rollouts, times = Recorded(), iter([10.0, 14.0])
    sampling = Sampling(1.0, 1.0, 32)
    prompts = [prompt(j) for j in range(3)]
    result = HeldOut(prompts, rollouts, sampling, seed=7, max_error_fraction=0.4, clock=lambda: next(times)).evaluate(3)
    assert (result.accuracy, result.non_truncated_accuracy) == (pytest.approx(1 / 3), 0.5)
    assert (result.truncation_ratio, result.mean_length_tokens) == (pytest.approx(1 / 3), 3.0)
    assert (result.problems, result.samples, result.decode_s, result.wall_s) == (3, 3, 1.5, 4.0)
    assert rollouts.asked == [(tuple(prompts), 3, sampling, 7)]


def test_without_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="no held-out problem"):
        HeldOut([], Recorded(), Sampling(1.0, 1.0, 32), seed=7, max_error_fraction=0.0)
