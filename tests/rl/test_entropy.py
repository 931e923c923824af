"""Adaptive entropy control against sequences worked by hand. They do not say that a real policy's entropy follows."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import completion, group_of, verdict

from or1_megatron.config.schema import EntropyConfig
from or1_megatron.rl.entropy import EntropyController, estimate, sampled_entropy


def drive(controller: EntropyController, entropies: list[float]) -> tuple[list[float], list[float]]:
    """(c_k, alpha_k) of each step."""
    coefficients, alphas = [], []
    for entropy in entropies:
        coefficients.append(controller.coefficient)
        alphas.append(controller.alpha(entropy))
        controller.advance(entropy)
    return coefficients, alphas


SEQUENCE = [0.1, 0.1, 0.3, 0.1, 0.2]
"""The docstring's, and then e on the target."""


@pytest.mark.parametrize(
    ("settings", "entropies", "coefficients", "alphas"),
    [
        ({}, SEQUENCE, [0, 0.005, 0.01, 0.005, 0.01], [0, 0.005, 0, 0.005, 0.01]),
        ({"gate": "late"}, SEQUENCE, [0, 0.005, 0.01, 0.005, 0.01], [0, 0.005, 0.01, 0, 0.01]),
        ({"gate": "off"}, SEQUENCE, [0, 0.005, 0.01, 0.005, 0.01], [0, 0.005, 0.01, 0.005, 0.01]),
        # on the target c rests; it is held at its minimum of 0
        (
            {"coefficient": 0.01},
            [0.2, 0.2, 0.3, 0.3, 0.3, 0.1],
            [0.01, 0.01, 0.01, 0.005, 0, 0],
            [0.01, 0.01, 0, 0, 0, 0],
        ),
        (
            {"coefficient": 0.001, "delta": 0.0015, "maximum": 0.002},
            [0.1, 0.1, 0.3, 0.3],
            [0.001, 0.002, 0.002, 0.0005],
            [0.001, 0.002, 0, 0],
        ),
        ({"mode": "fixed", "coefficient": 0.003}, [0.1, 0.9], [0.003, 0.003], [0.003, 0.003]),
        ({"mode": "off", "coefficient": 0.003}, [0.1, 0.9], [0.003, 0.003], [0, 0]),
    ],
)
def test_control_by_hand(
    settings: dict[str, Any], entropies: list[float], coefficients: list[float], alphas: list[float]
) -> None:
    """Target 0.2 and delta 0.005 unless given: as the report gates, one step late as the released code, not at all."""
    controller = EntropyController(EntropyConfig.model_validate({"target": 0.2, "delta": 0.005} | settings))
    assert drive(controller, entropies) == (
        pytest.approx(coefficients, abs=1e-15),
        pytest.approx(alphas, abs=1e-15),
    )


def test_state_survives_json_exactly() -> None:
    """A sum of many deltas is no round number; it must come back bit by bit. So does the late gate's e_{k-1}."""
    config = EntropyConfig(delta=0.1 / 3, gate="late")
    first, second = EntropyController(config), EntropyController(config)
    drive(first, [0.1] * 7 + [0.3])
    second.restore(json.loads(json.dumps(first.state())))
    assert second.coefficient == first.coefficient > 0
    assert second.alpha(0.1) == 0.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"delta": -0.1}, "greater than or equal to 0"),
        ({"maximum": 0.05, "coefficient": 0.1}, r"\(c_0\) = 0.1 is above maximum = 0.05"),
    ],
)
def test_settings_that_contradict_are_refused(values: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        EntropyConfig.model_validate(values)


def test_which_estimate_the_controller_gets() -> None:
    """Two groups of log-prob -1 and -3 per token, the second kept: over all 2, over kept 3."""
    groups = [
        replace(group, completions=tuple(replace(c, log_probs=c.log_probs * factor) for c in group.completions))
        for group, factor in ((group_of([1, 1]), 1), (group_of([1, 0]), 3))
    ]
    kept, on_kept = groups[1:], EntropyConfig(measured_on="kept")
    assert estimate(groups, kept, EntropyConfig()) == (2.0, 2.0)
    assert estimate(groups, kept, on_kept) == (3.0, 2.0)
    assert estimate(groups, [], on_kept) == (2.0, 2.0)


def test_sampled_entropy_is_a_token_mean_over_all_responses() -> None:
    """Log-probs (-1, -1, -1) and (-5): 8 / 4 = 2, where a mean over responses would say 3. One that is not finite is
    named, and no token at all is refused."""
    responses = (
        completion([1, 5, 0], log_probs=np.array([-1, -1, -1], dtype=np.float32)),
        completion([0], log_probs=np.array([-5], dtype=np.float32)),
    )
    group = replace(group_of([1, 0]), completions=responses, verdicts=(verdict("right"), verdict("right")))
    assert sampled_entropy([group]) == 2.0
    bad = completion([1, 0], j=3, sample=1, log_probs=np.array([-1, -np.inf], dtype=np.float32))
    with pytest.raises(ValueError, match="problem p3, sample 1: engine 0"):
        sampled_entropy([replace(group_of([0, 0]), completions=(completion([0]), bad))])
    with pytest.raises(ValueError, match="no response token"):
        sampled_entropy([])
