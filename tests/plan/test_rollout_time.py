"""The event model against figures worked by hand and a simulation that moves token by token.

Not proven here: that engines take the time which the clocks say (lab/benchmarks/plan_paper.py compares with
published runs).
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from or1_megatron.plan.rollout_time import Workload, simulate
from or1_megatron.rollout.scheduler import Action, Scheduler, Submit
from or1_megatron.rollout.simulated_engine import PARTS, Asked, EngineClock, SimulatedEngine
from or1_megatron.rollout.simulation import _completion
from or1_megatron.types import RefillRule, Request, Sampling

CLOCK = EngineClock(
    fixed_s=1.0, response_s=0.1, weights_s=0.5, product_s=0.2, token_s=0.01, prompt_token_s=0.02, prompt_pair_s=0.001,
    kv_tokens=10_000, max_running=4, block_tokens=4,
)  # fmt: skip
SAMPLING = Sampling(1.0, 1.0, 1000)


def work(prompts: list[int], responses: list[int], group_size: int) -> Workload:
    return Workload(np.array(prompts), np.array(responses), group_size)


def test_two_responses_on_one_engine() -> None:
    """Prompt of 10: 0.2 + 0.1 s; the second finds two blocks of 4 and reads two tokens, 0.04 s and 0.1 - 0.064 s.
    Together 2 iterations: constant 1 + 0.2 + max(0.5, 0.4) = 1.7, and the keys of 20 and 22 tokens. Then the second
    alone, 2 iterations: 1 + 0.1 + 0.5 = 1.6, and 12 and 13 tokens."""
    both = work([10], [2, 4], 2)
    rollouts = both.on(CLOCK, 1, 1, verdict_s=0.25)
    first = 0.376 + 2 * 1.7 + 0.01 * (20 + 22)
    second = first + 2 * 1.6 + 0.01 * (12 + 13)
    assert simulate(both, rollouts) == pytest.approx((second, second + 0.25))
    (engine,) = rollouts.engines
    assert (engine.iteration, engine.preempted, engine.busy) == (4, 0, [(0.0, pytest.approx(second))])
    parts_s = dict(zip(PARTS, engine.parts, strict=True))
    assert sum(parts_s.values()) == pytest.approx(second)
    assert parts_s["prompts"] == pytest.approx(0.376)
    assert parts_s["keys and values"] == pytest.approx(0.01 * 67)


def test_one_verifier_is_a_queue() -> None:
    """Both end at once; their verdicts take 5 s each, one after the other, or beside each other with two verifiers."""
    both = work([10], [3, 3], 2)
    for verifiers, expected_s in ((1, 10), (2, 5)):
        decoded_s, judged_s = simulate(both, both.on(CLOCK, 1, verifiers, 5.0))
        assert judged_s - decoded_s == pytest.approx(expected_s)


def test_an_engine_looks_at_new_requests_at_its_next_iteration() -> None:
    """Begun at 0.3 with 10 tokens, alone: iterations of 1.6 + 0.1 and 1.6 + 0.11 end at 2.0 and 3.71. What comes at 2.5
    waits until 3.71, what comes at 2.0 does not wait, and what comes later finds the engine's own event first."""
    for moment_s, expected_s, iterations in ((2.5, 3.71, 2), (2.0, 2.0, 1)):
        engine = SimulatedEngine(CLOCK)
        (prompt,) = work([10], [8], 1).prompts
        engine.submit([Asked(Request(prompt, 0, SAMPLING, 1), 8)])
        engine.admit()
        assert engine.advance_to(moment_s)
        assert engine.now_s == pytest.approx(expected_s) and engine.iteration == iterations
        assert not engine.advance_to(100.0) and engine.iteration == iterations


def token_by_token(workload: Workload, clock: EngineClock, engines: int) -> dict[tuple[int, int], float]:
    """Every iteration of every engine on its own; returns when each response ended."""
    size = workload.group_size
    scheduler = Scheduler(engines, clock.max_running)
    _, actions = scheduler.begin(workload.prompts, size, SAMPLING, 0)
    waiting: list[list[Request]] = [[] for _ in range(engines)]
    decoding: list[dict[int, tuple[Request, int]]] = [{} for _ in range(engines)]  # by seed, with its tokens
    had: dict[int, int] = {}
    read: list[set[int]] = [set() for _ in range(engines)]
    ended: dict[tuple[int, int], float] = {}
    heap: list[tuple[float, int]] = []

    def prompt_of(request: Request) -> int:
        return int(request.prompt.problem.id)

    def context(engine: int) -> int:
        return sum(int(workload.prompt_tokens[prompt_of(r)]) + got for r, got in decoding[engine].values())

    def begin_iteration(engine: int, now: float) -> None:
        while waiting[engine] and len(decoding[engine]) < clock.max_running:
            request = waiting[engine][0]
            prompt, got = prompt_of(request), had.get(request.seed, 0)
            tokens = int(workload.prompt_tokens[prompt]) + got
            if decoding[engine] and context(engine) + tokens + len(decoding[engine]) + 1 > clock.kv_tokens:
                break
            waiting[engine].pop(0)
            cached = (tokens - 1) // 4 * 4 if not got and prompt in read[engine] else 0
            now += 0.02 * (tokens - cached) + 0.001 * (tokens**2 - cached**2)
            read[engine].add(prompt)
            decoding[engine][request.seed] = (request, got)
        if n := len(decoding[engine]):
            seconds = clock.fixed_s + n * clock.response_s + max(clock.weights_s, n * clock.product_s)
            heapq.heappush(heap, (now + seconds + clock.token_s * context(engine), engine))

    def deal(actions: list[Action], now: float, but: int | None) -> None:
        for action in actions:
            if isinstance(action, Submit):
                idle = not decoding[action.engine]
                waiting[action.engine].extend(action.requests)
                if idle and action.engine != but:
                    begin_iteration(action.engine, now)

    deal(actions, 0.0, None)
    while heap:
        now, engine = heapq.heappop(heap)
        done = []
        for seed, (request, got) in decoding[engine].items():
            decoding[engine][seed] = (request, got + 1)
            if got + 1 == workload.length_of(request):
                done.append(request)
        for request in done:
            del decoding[engine][request.seed]
            ended[prompt_of(request), request.sample_index] = now
        while decoding[engine] and context(engine) + len(decoding[engine]) > clock.kv_tokens:
            seed, (request, got) = decoding[engine].popitem()
            had[seed] = got
            waiting[engine].insert(0, request)
        if done:
            made = [_completion(Asked(request, 1, 0, 0.0), (), now, engine) for request in done]
            deal(scheduler.finished(engine, made), now, engine)
        begin_iteration(engine, now)
    return ended


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_tokens", [10_000, 150])
def test_against_token_by_token(seed: int, kv_tokens: int) -> None:
    """40 responses on 3 engines; the small cache preempts."""
    random = np.random.default_rng(seed)
    workload = Workload(random.integers(5, 30, 10), random.integers(1, 60, 40), 4)
    clock = replace(CLOCK, kv_tokens=kv_tokens, fixed_s=float(random.uniform(0.1, 2)))
    rollouts = workload.on(clock, 3, 2, 0.5)
    rollouts.roll_out(workload.prompts, 4, SAMPLING, 0)
    groups, _ = rollouts.collect()
    found = {(int(c.problem_id), c.sample_index): c.finished_s for group in groups for c in group.completions}
    assert found == pytest.approx(token_by_token(workload, clock, 3), rel=1e-9)
    assert any(engine.preempted for engine in rollouts.engines) == (kv_tokens == 150)


def test_refill_ends_with_enough_kept_groups() -> None:
    """Two groups wanted of four prompts, the second rejected: the result is three prompts, the long fourth given up."""
    lengths = np.array([2, 2, 2, 2, 2, 2, 500, 500])
    workload = Workload(np.full(4, 5), lengths, 2, kept=(True, False, True, True))
    rollouts = workload.on(replace(CLOCK, max_running=8), 1, 1, 0.1)
    keeps = RefillRule(2, lambda group: bool(group.rewards.any()), 0.25)
    rollouts.roll_out(workload.prompts, 2, SAMPLING, 0, keeps)
    groups, _ = rollouts.collect()
    assert [group.prompt.problem.id for group in groups] == ["0", "1", "2"]
    assert rollouts.now_s < 100
