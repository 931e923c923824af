"""The event model of engines against figures worked by hand and a simulation that moves token by token.

Not proven here: that engines take the time which the clocks say (lab/benchmarks/plan_paper.py compares with
published runs), and what preemption costs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from or1_megatron.plan.engines import PARTS, EngineClock, PlannedEngines

CLOCK = EngineClock(
    fixed_s=1.0, response_s=0.1, weights_s=0.5, product_s=0.2, token_s=0.01, prompt_token_s=0.02, prompt_pair_s=0.001,
    kv_tokens=10_000, max_running=4,
)  # fmt: skip


def tokens(*lengths: int) -> np.ndarray:
    return np.array(lengths, dtype=np.int64)


def test_two_responses_on_one_engine() -> None:
    """A prompt of 10 is read once by each engine: 0.2 + 0.1 s. Together 2 iterations: constant 1 + 0.2 + max(0.5, 0.4)
    = 1.7, and the keys of 20 and 22 tokens. Then the second alone, 2 iterations: 1 + 0.1 + 0.5 = 1.6, and 12 and 13
    tokens. Its verdict takes 0.25 s."""
    engines = PlannedEngines(CLOCK, 1, verdict_s=0.25)
    ticket = engines.request(tokens(10), tokens(2, 4), 2)
    expected = 0.3 + 2 * 1.7 + 0.01 * (20 + 22) + 2 * 1.6 + 0.01 * (12 + 13)
    assert engines.wait(ticket) == pytest.approx(0.25) and engines.now_s == pytest.approx(expected)
    parts_s = dict(zip(PARTS, engines.parts_s(), strict=True))
    assert sum(parts_s.values()) == pytest.approx(expected)
    assert parts_s["prompts"] == pytest.approx(0.3) and parts_s["keys and values"] == pytest.approx(0.01 * 67)
    assert parts_s["per response"] == pytest.approx(0.1 * 6) and parts_s["products"] == 0
    for count, readings in ((2, 2), (8, 4)):  # four responses on two engines, or on four of eight
        engines = PlannedEngines(CLOCK, count)
        engines.wait(engines.request(tokens(10), tokens(3, 3, 3, 3), 4))
        assert engines.parts_s()[PARTS.index("prompts")] == pytest.approx(readings * 0.3)


def test_one_verifier_is_a_queue() -> None:
    """Both end at once; their verdicts take 5 s each, one after the other, or beside each other with two verifiers."""
    for verifiers, expected_s in ((1, 10), (2, 5)):
        engines = PlannedEngines(CLOCK, 1, verifiers, 5.0)
        assert engines.wait(engines.request(tokens(10), tokens(3, 3), 2)) == pytest.approx(expected_s)


def test_a_handoff_stops_engines_and_time_passes_for_all() -> None:
    """Lengths 4 and 8; an iteration takes 1 s alone, 2 s with two. After 4 s both have 2 tokens, the handoff takes 1 s;
    at 9 s the first ends; the second then has 4 of 8 and needs 1 s for each of the others."""
    engines = PlannedEngines(EngineClock(2, response_s=1.0), 1)
    ticket = engines.request(tokens(1, 1), tokens(4, 8), 1)
    engines.spend(4.0)
    engines.pause(1.0)
    engines.wait(ticket)
    assert engines.now_s == pytest.approx(13.0) and engines.parts_s().sum() == pytest.approx(12.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kv_tokens", [10_000, 150])
def test_against_token_by_token(seed: int, kv_tokens: int) -> None:
    """40 responses on one engine, whose small cache holds two or three of them, decoded one iteration at a time."""
    random = np.random.default_rng(seed)
    prompts, lengths = random.integers(5, 30, 10), random.integers(1, 60, 40)
    clock = replace(CLOCK, kv_tokens=kv_tokens, fixed_s=float(random.uniform(0.1, 2)))
    engines = PlannedEngines(clock, 1)
    engines.wait(engines.request(prompts, lengths, 4))

    waiting = [(int(prompts[i // 4]), int(length)) for i, length in enumerate(lengths)]
    running: list[list[int]] = []  # [tokens held, tokens to come, tokens reserved]
    now_s = 0.0
    while waiting or running:
        while waiting and len(running) < clock.max_running:
            prompt, length = waiting[0]
            reserved = prompt + length // 2
            if running and sum(one[2] for one in running) + reserved > kv_tokens:
                break
            running.append([*waiting.pop(0), reserved])
            now_s += (0.02 * prompt + 0.001 * prompt**2) / 4
        n = len(running)
        now_s += clock.fixed_s + n * 0.1 + max(0.5, n * 0.2) + 0.01 * sum(held for held, _, _ in running)
        running = [[held + 1, left - 1, reserved] for held, left, reserved in running if left > 1]
    assert engines.now_s == pytest.approx(now_s, rel=1e-9)


def test_requests_go_to_the_emptiest_engine_and_wait_for_a_place() -> None:
    """Two engines of two places, 1 s an iteration: of five responses the last begins when the shortest has ended."""
    engines = PlannedEngines(EngineClock(2, fixed_s=1.0), 2)
    engines.wait(engines.request(tokens(1, 1, 1, 1, 1), tokens(9, 3, 5, 9, 10), 1))
    assert engines.now_s == pytest.approx(3 + 10)
