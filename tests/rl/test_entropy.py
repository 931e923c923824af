"""Adaptive entropy control against sequences worked by hand. They do not say that a real policy's entropy follows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import completion, group_of, verdict

from or1_megatron.config.algorithm import ClipHighConfig, LossConfig
from or1_megatron.config.schema import EntropyConfig
from or1_megatron.rl.entropy import ClipHighController, EntropyController, estimate, full_entropy, sampled_entropy


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


def test_gates_by_hand() -> None:
    """The docstring's e, on the target at last: as the report gates, one step late as the released code, not at all."""
    entropies = [0.1, 0.1, 0.3, 0.1, 0.2]
    coefficients = [0, 0.005, 0.01, 0.005, 0.01]
    for gate, expected in [
        ("now", [0, 0.005, 0, 0.005, 0.01]),
        ("late", [0, 0.005, 0.01, 0, 0.01]),
        ("off", coefficients),
    ]:
        found = drive(EntropyController(EntropyConfig.model_validate({"gate": gate})), entropies)
        assert found == (pytest.approx(coefficients, abs=1e-15), pytest.approx(expected, abs=1e-15))


def test_the_late_gate_is_remembered_over_a_resume() -> None:
    config = EntropyConfig(gate="late", coefficient=0.01)
    first, second = EntropyController(config), EntropyController(config)
    first.advance(0.3)
    second.restore(json.loads(json.dumps(first.state())))
    assert (second.coefficient, second.alpha(0.1)) == (0.005, 0.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"mode": "proportional_integral"}, "both gains 0 never moves"),
        ({"integral_gain": 0.1}, "integral_gain = 0.1 belong to mode proportional_integral; mode is adaptive"),
        ({"mode": "off", "estimate": "full"}, "estimate full takes a forward pass"),
        ({"delta": -0.1}, "greater than or equal to 0"),
        ({"minimum": 0.1, "maximum": 0.05, "coefficient": 0.1}, "minimum = 0.1 is above maximum = 0.05"),
    ],
)
def test_settings_that_contradict_are_refused(values: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        EntropyConfig.model_validate(values)


def test_proportional_integral_by_hand() -> None:
    """The docstring's sequence, and then that it comes back at once: e 0.15: 0.005 + 0.011 = 0.016."""
    config = EntropyConfig(
        mode="proportional_integral", coefficient=0.01, maximum=0.02, proportional_gain=0.1, integral_gain=0.05
    )
    coefficients, alphas = drive(EntropyController(config), [0.1, 0.18, 0.4, 0.4, 0.15])
    assert coefficients == pytest.approx([0.01, 0.01, 0.011, 0.011, 0.011])
    assert alphas == pytest.approx([0.02, 0.012, 0.0, 0.0, 0.016])


def test_anti_windup_at_the_bounds_exactly() -> None:
    """In powers of two, so that a bound is met exactly: target 1/2, bounds [0, 1/8], c 1/16.

    K_p 1/4, e 1/4: 1/16 + 1/16 = 1/8, at the highest and pushing up: c stays; e 3/4: 0, at the lowest: c stays.
    K_p 0, c at a bound: an error that pushes inwards moves it, by K_i * 1/4 = 1/16.
    """

    def next_coefficient(gain: float, coefficient: float, entropy: float) -> float:
        control = EntropyController(
            EntropyConfig(
                mode="proportional_integral",
                target=0.5,
                coefficient=coefficient,
                maximum=0.125,
                proportional_gain=gain,
                integral_gain=0.25,
            )
        )
        control.advance(entropy)
        return control.coefficient

    assert next_coefficient(0.25, 0.0625, 0.25) == next_coefficient(0.25, 0.0625, 0.75) == 0.0625
    assert next_coefficient(0.0, 0.125, 0.25) == 0.125
    assert next_coefficient(0.0, 0.125, 0.75) == 0.0625
    assert next_coefficient(0.0, 0.0, 0.75) == 0.0
    assert next_coefficient(0.0, 0.0, 0.25) == 0.0625


def test_clip_high_control_by_hand() -> None:
    """The docstring's sequence; with delta 0 it stands; state and configuration as of the entropy controller."""
    config = LossConfig(clip_high_control=ClipHighConfig(delta=0.02, minimum=0.2, maximum=0.23))
    control, seen = ClipHighController(config, 0.2), []
    for entropy in [0.1, 0.1, 0.3, 0.2]:
        seen.append(control.value)
        control.advance(entropy)
    assert [*seen, control.value] == pytest.approx([0.2, 0.22, 0.23, 0.21, 0.21])
    other = ClipHighController(config, 0.2)
    other.restore(json.loads(json.dumps(control.state())))
    assert other.value == control.value
    still = ClipHighController(LossConfig(clip_high=0.28), 0.2)
    still.advance(0.1)
    still.restore(control.state())
    assert still.value == 0.28
    with pytest.raises(ValueError, match=r"clip_high = 0.4.*outside its \[minimum, maximum\] = \[0.2, 0.28\]"):
        LossConfig(clip_high=0.4, clip_high_control=ClipHighConfig(delta=0.01))


def test_which_estimate_the_controller_gets() -> None:
    """Two groups of log-prob -1 and -3 per token, the second kept: over all 2, over kept 3; full: the mean of (1, 2)
    and (6)."""
    groups = [
        replace(group, completions=tuple(replace(c, log_probs=c.log_probs * factor) for c in group.completions))
        for group, factor in ((group_of([1, 1]), 1), (group_of([1, 0]), 3))
    ]
    kept, full = groups[1:], [np.array([1, 2], np.float32), np.array([6], np.float32)]
    on_kept = EntropyConfig(measured_on="kept")
    assert estimate(groups, kept, None, EntropyConfig()) == (2.0, 2.0)
    assert estimate(groups, kept, None, on_kept) == (3.0, 2.0)
    assert estimate(groups, [], None, on_kept) == (2.0, 2.0)
    assert estimate(groups, kept, full, EntropyConfig(estimate="full")) == (3.0, 2.0)
    with pytest.raises(ValueError, match="over 1 response tokens is nan"):
        full_entropy([np.array([np.nan])])


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
