"""avg@k by hand, and that evaluation asks for what it should. It does not prove that a real engine is repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from or1_megatron.config.schema import EvaluationConfig
from or1_megatron.evaluate.held_out import HeldOut, combine, summarise
from or1_megatron.rl.metrics import evaluation_metrics
from or1_megatron.types import Completion, Group, Prompt, RolloutReport, Sampling, VersionSpan
from or1_verify.types import Message, Problem, Verdict


def prompt(j: int) -> Prompt:
    row = Problem(f"p{j}", "held-out", "math", (Message("user", str(j)),), '["1"]', {}, f"held_out.jsonl:{j}")
    return Prompt(row, np.array([j], dtype=np.int32))


def response(of: Prompt, sample: int, tokens: int, truncated: bool) -> Completion:
    ids, log_probs = np.zeros(tokens, dtype=np.int32), np.zeros(tokens, dtype=np.float32)
    reason = "length" if truncated else "stop"
    return Completion(of.problem.id, sample, ids, log_probs, "", reason, (VersionSpan(0, 0),), 0, 0, 0.0, 0.0)


def settings(*sets: dict[str, Any], **values: Any) -> EvaluationConfig:
    return EvaluationConfig(data=[{"path": "x.jsonl", **each} for each in sets], seed=7, **values)


class Recorded:
    """Rollouts that play back: sample i of problem j has 2 + i tokens, is right for i < j, truncated for i == 2."""

    def __init__(self) -> None:
        self.right: dict[str, int] = {}
        self.asked: list[tuple[Sequence[Prompt], int, Sampling, int]] = []

    def roll_out(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int, *, urgent: bool
    ) -> int:
        assert urgent
        self.asked.append((prompts, group_size, sampling, seed))
        return len(self.asked)

    def wait_decoded(self, ticket: int | None = None) -> None:
        pass

    def collect(self, ticket: int | None = None) -> tuple[list[Group], RolloutReport]:
        prompts, size, _, _ = self.asked[-1]
        groups = []
        for j, each in enumerate(prompts):
            completions = tuple(response(each, i, 2 + i, truncated=i == 2) for i in range(size))
            right = self.right.get(each.problem.id, j)
            verdicts = tuple(
                Verdict(float(i < right and i != 2), "right" if i < right else "wrong", "", "", 0.0)
                for i in range(size)
            )
            groups.append(Group(each, completions, verdicts))
        return groups, RolloutReport(1.5, (1.5,), 2.0, 0, 0, 0.0, 0)

    def progress(self) -> tuple[int, int]:
        return (0, 0)


def test_average_at_k() -> None:
    """3 problems x 3 samples: right are (1, 0), (2, 0), (2, 1): 3 of 9; 3 of the 6 that are not truncated; 3 tokens."""
    rollouts, times = Recorded(), iter([10.0, 14.0])
    prompts = [prompt(j) for j in range(3)]
    kept: list[Group] = []
    held_out = HeldOut({"aime": prompts}, rollouts, 32, 0.4, lambda: next(times), kept.extend)
    result = held_out.evaluate(settings({"name": "aime"}, samples=3), whole=True)
    assert (result.accuracy, result.non_truncated_accuracy) == (pytest.approx(1 / 3), 0.5)
    assert (result.truncation_ratio, result.mean_length_tokens) == (pytest.approx(1 / 3), 3.0)
    assert (result.problems, result.samples, result.decode_s, result.wall_s) == (3, 3, 1.5, 4.0)
    assert result.sets == {} and [one.prompt for one in kept] == prompts
    assert result.more == pytest.approx({"pass@2": 5 / 9, "pass@3": 2 / 3})  # 0, 2 and 3 of 3 pairs hold a right one
    assert rollouts.asked == [(tuple(prompts), 3, Sampling(1.0, 1.0, 32), 7)]


def test_pass_and_best_of_k_by_all_choices_and_sources() -> None:
    """Oracle: the mean over all choices of k of 5 samples, enumerated. 0.25 and -1 are rewards of wrong responses."""
    rewards = [[0.25, -1.0, 1.0, 0.0, 0.25], [0.0, 0.5, -1.0, -1.0, 0.5], [1.0, 1.0, 0.0, 1.0, 0.0]]
    groups = []
    for j, row in enumerate(rewards):
        verdicts = tuple(Verdict(r, "right" if r == 1 else "wrong", "", "", 0.0) for r in row)
        of = prompt(j)
        of = replace(of, problem=replace(of.problem, source=("a/b", "a/b", "c")[j]))
        groups.append(Group(of, tuple(response(of, i, 2, truncated=False) for i in range(5)), verdicts))
    expected = {"source/a/b/accuracy": 0.1, "source/c/accuracy": 0.6}
    for k in (2, 4, 5):
        chosen = [list(combinations(row, k)) for row in rewards]
        expected[f"pass@{k}"] = np.mean([np.mean([1.0 in each for each in row]) for row in chosen])
        expected[f"best@{k}"] = np.mean([np.mean([max(each) for each in row]) for row in chosen])
    result = summarise(groups, RolloutReport(1.5, (1.5,), 2.0, 0, 0, 0.0, 0), 1.0)
    assert result.more == pytest.approx(expected)
    metrics = evaluation_metrics(combine({"one": result, "two": replace(result, more={"pass@2": 1.0})}))
    assert metrics["evaluation/pass@2"] == pytest.approx((expected["pass@2"] + 1) / 2)
    assert "evaluation/pass@4" not in metrics and metrics["evaluation/one/pass@4"] == pytest.approx(expected["pass@4"])
    assert metrics["evaluation/one/source/a/b/accuracy"] == pytest.approx(0.1)


def test_several_sets() -> None:
    """Set "one" is problem 1 (right: sample 0), "two" problems 1 and 2 (right: (1, 0), (2, 0), (2, 1)): avg@2 1/2 and
    3/4, together 5/8 however many problems each has. What a set has of its own beats the settings."""
    rollouts = Recorded()
    sets = {"one": [prompt(1)], "two": [prompt(1), prompt(2)]}
    rollouts.right = {"p1": 1, "p2": 2}
    held_out = HeldOut(sets, rollouts, 32, max_error_fraction=0.4)
    two = {"name": "two", "samples_during": 2, "temperature": 0.0, "max_response_tokens": 64}
    given = settings({"path": "data/one.jsonl"}, two, samples=9, samples_during=2, temperature=0.6, top_p=0.9)
    result = held_out.evaluate(given, whole=False)
    assert {name: each.accuracy for name, each in result.sets.items()} == {"one": 0.5, "two": 0.75}
    assert (result.accuracy, result.problems, result.samples, result.decode_s) == (0.625, 3, 2, 3.0)
    assert rollouts.asked == [
        (tuple(sets["one"]), 2, Sampling(0.6, 0.9, 32), 7),
        (tuple(sets["two"]), 2, Sampling(0.0, 0.9, 64), 7),
    ]
    assert evaluation_metrics(result)["evaluation/two/accuracy"] == 0.75


def test_without_problems_is_refused() -> None:
    for sets in ({}, {"aime": []}):
        with pytest.raises(ValueError, match="no held-out problem"):
            HeldOut(sets, Recorded(), 32, max_error_fraction=0.0)
