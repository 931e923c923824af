"""Adaptive entropy control against sequences worked by hand. They do not say that a real policy's entropy follows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import completion, group_of, verdict

from or1_megatron.config import EntropyConfig
from or1_megatron.rl.entropy import EntropyController, sampled_entropy


def drive(controller: EntropyController, entropies: list[float]) -> tuple[list[float], list[float]]:
    """(c_k, alpha_k) of each step."""
    coefficients, alphas = [], []
    for entropy in entropies:
        coefficients.append(controller.coefficient)
        alphas.append(controller.alpha(entropy))
        controller.advance(entropy)
    return coefficients, alphas


def test_rule_by_hand() -> None:
    """The docstring's sequence, then e on the target (c rests, alpha stays on), and c held at its minimum 0."""
    controller = EntropyController(EntropyConfig(target=0.2, delta=0.005))
    coefficients, alphas = drive(controller, [0.1, 0.1, 0.3, 0.1, 0.2, 0.2, 0.3, 0.3, 0.3, 0.1])
    assert coefficients == pytest.approx([0, 0.005, 0.01, 0.005, 0.01, 0.01, 0.01, 0.005, 0, 0], abs=1e-15)
    assert alphas == pytest.approx([0, 0.005, 0, 0.005, 0.01, 0.01, 0, 0, 0, 0], abs=1e-15)


def test_maximum_and_nonzero_minimum() -> None:
    """Bounds [0.001, 0.002], delta 0.0015, c_0 0.001: up to the maximum, down to the minimum."""
    config = EntropyConfig(coefficient=0.001, delta=0.0015, minimum=0.001, maximum=0.002)
    coefficients, _ = drive(EntropyController(config), [0.1, 0.1, 0.3, 0.3])
    assert coefficients == pytest.approx([0.001, 0.002, 0.002, 0.001], abs=1e-15)
    with pytest.raises(ValueError, match=r"c_0.*outside.*\[0.001, 0.002\]"):
        EntropyConfig(minimum=0.001, maximum=0.002)


def test_fixed_and_off() -> None:
    fixed = EntropyController(EntropyConfig(mode="fixed", coefficient=0.003))
    assert drive(fixed, [0.1, 0.9]) == ([0.003, 0.003], [0.003, 0.003])
    assert drive(EntropyController(EntropyConfig(mode="off", coefficient=0.003)), [0.1, 0.9])[1] == [0, 0]


def test_state_survives_json_exactly() -> None:
    """A sum of many deltas is no round number; it must come back bit by bit."""
    first = EntropyController(EntropyConfig(delta=0.1 / 3))
    drive(first, [0.1] * 7)
    second = EntropyController(EntropyConfig(delta=0.1 / 3))
    second.restore(json.loads(json.dumps(first.state())))
    assert second.coefficient == first.coefficient > 0


def test_sampled_entropy_is_a_token_mean_over_all_responses() -> None:
    """Log-probs (-1, -2, -3) and (-2): 8 / 4 = 2; a mean over responses would say (2 + 2) / 2 of other numbers too, so
    the second case, (-1, -1, -1) and (-5): 8 / 4 = 2 against 3."""
    for first, second in [([-1, -2, -3], [-2]), ([-1, -1, -1], [-5])]:
        responses = (
            completion([1, 5, 0], log_probs=np.array(first, dtype=np.float32)),
            completion([0], log_probs=np.array(second, dtype=np.float32)),
        )
        group = replace(group_of([1, 0]), completions=responses, verdicts=(verdict("right"), verdict("right")))
        assert sampled_entropy([group]) == 2.0


def test_sampled_entropy_names_a_bad_log_prob() -> None:
    bad = completion([1, 0], j=3, sample=1, log_probs=np.array([-1, -np.inf], dtype=np.float32))
    with pytest.raises(ValueError, match="problem p3, sample 1: engine 0"):
        sampled_entropy([replace(group_of([0, 0]), completions=(completion([0]), bad))])
    with pytest.raises(ValueError, match="no response token"):
        sampled_entropy([])
