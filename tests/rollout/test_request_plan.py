"""Seeds, order and the report's arithmetic; no engine."""

from __future__ import annotations

import heapq
import subprocess
import sys
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from engine_fixtures import prompt

from or1_megatron.rollout.refill import SamplingBudget
from or1_megatron.rollout.request_plan import (
    assemble_group,
    dispatch,
    plan_requests,
    request_digest,
    request_seed,
)
from or1_megatron.types import Completion, Group, RefillRule, Request, Sampling, VersionSpan
from or1_verify.types import Verdict

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_tokens=8)


def completion(problem: str, sample: int) -> Completion:
    empty = np.zeros(0)
    spans = (VersionSpan(0, 0),)
    return Completion(
        problem, sample, empty.astype(np.int32), empty.astype(np.float32), "", "stop", spans, 0, sample, 0.0, 0.0
    )


def test_seed_is_blake2b_of_the_decimal_parts_in_any_process() -> None:
    """Against a computation by hand and a second interpreter with other hash randomisation."""
    import hashlib

    expected = int.from_bytes(hashlib.blake2b(b"3,0,15", digest_size=8).digest(), "big") // 2
    code = "from or1_megatron.rollout.request_plan import request_seed; print(request_seed(3, 0, 15))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert request_seed(3, 0, 15) == expected == int(other)


def test_seeds_of_a_roll_out_differ_within_it_and_between_steps() -> None:
    """Does not prove statistical independence of the streams that the seeds start."""
    prompts = [prompt([2, 7], name=str(index)) for index in range(50)]
    first = {request.seed for request in plan_requests(prompts, 16, SAMPLING, request_seed(1, 0)).values()}
    second = {request.seed for request in plan_requests(prompts, 16, SAMPLING, request_seed(1, 1)).values()}
    assert len(first) == len(second) == 800
    assert not first & second
    assert all(0 <= seed < 2**63 for seed in first)


def test_a_digest_is_of_problem_prompt_and_sampling() -> None:
    """Against a computation by hand. Each of them changes it; sample and seed do not."""
    import hashlib

    asked = Request(prompt([2, 300], name="a"), 0, Sampling(0.6, 0.95, 8), seed=7)
    by_hand = hashlib.blake2b(b"('a', 0.6, 0.95, 8)" + bytes([2, 0, 0, 0, 44, 1, 0, 0]), digest_size=16).digest()
    assert request_digest(asked) == by_hand
    others = [
        replace(asked, prompt=prompt([2, 300], name="b")),
        replace(asked, prompt=prompt([2, 301], name="a")),
        replace(asked, prompt=prompt([2], name="a")),
        replace(asked, sampling=Sampling(0.7, 0.95, 8)),
        replace(asked, sampling=Sampling(0.6, 1.0, 8)),
        replace(asked, sampling=Sampling(0.6, 0.95, 9)),
    ]
    assert len({by_hand, *map(request_digest, others)}) == 7
    assert request_digest(replace(asked, sample_index=1, seed=8)) == by_hand


def test_groups_come_in_order_of_prompts_and_samples_whatever_the_order_of_arrival() -> None:
    prompts = [prompt([2], name="same"), prompt([2, 3], name="same")]  # one problem may stand in a batch twice
    arrival = [(1, 1), (0, 0), (1, 0), (0, 1)]
    completions = {key: completion(f"prompt{key[0]}", key[1]) for key in arrival}
    verdicts = {key: Verdict(float(key[0] == key[1]), "right", "", "", 0.0) for key in arrival}
    groups = [assemble_group(prompts, index, 2, completions, verdicts) for index in range(2)]
    assert [[(c.problem_id, c.sample_index) for c in group.completions] for group in groups] == [
        [("prompt0", 0), ("prompt0", 1)],
        [("prompt1", 0), ("prompt1", 1)],
    ]
    assert [group.rewards.tolist() for group in groups] == [[1.0, 0.0], [0.0, 1.0]]
    del verdicts[1, 0]
    assert assemble_group(prompts, 1, 2, completions, verdicts) is None


def group(kept: bool) -> Group:
    """Kept by ``right``: its one response is."""
    return Group(prompt([2]), (completion("p", 0),), (Verdict(float(kept), "right" if kept else "wrong", "", "", 0.0),))


def right(judged: Group) -> bool:
    return bool(judged.rewards[0])


def test_the_budget_worked_example() -> None:
    """The docstring's first, by hand; then 3 wanted of 8, in this order of verdicts: two kept among 0..3 and 2 still
    out, then 2 is rejected, 4 kept: 0, 3, 4."""
    assert SamplingBudget(100, RefillRule(30, right, 0.4)).allowed == 63
    assert SamplingBudget(50, RefillRule(30, right, 0.4)).allowed == 50
    assert SamplingBudget(100, RefillRule(30, right, 1.0)).allowed == 100
    budget = SamplingBudget(8, RefillRule(3, right))
    assert budget.allowed == 3  # nothing speaks for a rejection
    for index, kept in ((1, False), (3, True), (0, True), (2, False), (4, True)):
        assert not budget.over and budget.limit == 8 and budget.allowed >= min(8, 3 + (index != 1))
        budget.judged(index, group(kept))
    assert budget.over and budget.limit == 5


def test_the_budget_knows_what_cannot_be_part_of_the_result() -> None:
    """2 wanted: with 3 and 5 kept, nothing from 6 on; with 1 too, nothing from 4 on. Then a rejected 0 ends it."""
    budget = SamplingBudget(9, RefillRule(2, right))
    limits = []
    for index, kept in ((3, True), (5, True), (1, True), (2, False), (0, False)):
        budget.judged(index, group(kept))
        limits.append(budget.limit)
        assert budget.allowed <= budget.limit
    assert limits == [9, 6, 4, 4, 4] and budget.over and budget.limit == 4


def test_the_budget_does_not_depend_on_the_order_of_verdicts() -> None:
    """500 drawn cases: judged in any order that the budget lets out, the result is the shortest run of prompts with
    enough groups kept, or all; what is let out never falls short of it."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        prompts, wanted = int(rng.integers(1, 20)), int(rng.integers(1, 8))
        kept = rng.random(prompts) < rng.random()
        found = np.flatnonzero(kept.cumsum() >= wanted)
        expected = int(found[0]) + 1 if found.size else prompts
        budget, judged = SamplingBudget(prompts, RefillRule(wanted, right, expected_rejected=rng.random())), set[int]()
        while not budget.over:
            allowed = budget.allowed
            open_ones = [index for index in range(allowed) if index not in judged]
            index = int(rng.choice(open_ones))  # there is always one
            budget.judged(index, group(bool(kept[index])))
            judged.add(index)
        assert budget.limit == expected and set(range(expected)) <= judged


@pytest.mark.parametrize("expected_rejected", [0.0, 0.4], ids=["nothing known", "share known"])
def test_no_engine_idles_while_there_may_be_work(expected_rejected: float) -> None:
    """Four engines with room for 40 and responses of very unequal lengths, 24 groups of 4 wanted of 96, two in five
    rejected. Whenever requests wait that may be part of the result, every engine has the 4 that count as little, and
    none has more than its room; the result is as without speculation. No time is proved."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        prompts, samples, engines, room, low = 96, 4, 4, 40, 4
        kept = rng.random(prompts) > 0.4
        turns = {(p, s): float(rng.lognormal(0.0, 1.0)) for p in range(prompts) for s in range(samples)}
        requests = plan_requests([prompt([2])] * prompts, samples, SAMPLING, 1)
        budget, waiting = SamplingBudget(prompts, RefillRule(24, right, expected_rejected)), deque(requests.items())
        load, now, busy, left = (
            dict.fromkeys(range(engines), 0),
            0.0,
            list[tuple[float, int, int]](),
            [samples] * prompts,
        )
        while not budget.over:
            for index, sent in dispatch(waiting, budget, load, room, low).items():
                load[index] += len(sent)
                for key, _ in sent:
                    heapq.heappush(busy, (now + turns[key], index, key[0]))
            assert max(load.values()) <= room
            assert not waiting or waiting[0][0][0] >= budget.limit or min(load.values()) >= low
            now, index, prompt_index = heapq.heappop(busy)
            load[index] -= 1
            left[prompt_index] -= 1
            if not left[prompt_index]:
                budget.judged(prompt_index, group(bool(kept[prompt_index])))
        found = np.flatnonzero(kept.cumsum() >= 24)
        assert budget.limit == (found[0] + 1 if found.size else prompts)


def test_requests_go_to_whichever_engine_has_least() -> None:
    """3 wanted of 4 prompts of 2: the first three prompts up to the room, the fourth to who has less than 2."""
    requests = plan_requests([prompt([2])] * 4, 2, SAMPLING, 1)
    for outstanding, room, expected in (
        ({0: 3, 1: 0}, 5, {0: 2, 1: 4}),  # the six, none of the fourth prompt
        ({0: 0, 2: 0}, 1, {0: 1, 2: 1}),
        ({0: 0, 1: 9, 2: 9, 3: 9, 4: 9, 5: 9}, 9, {0: 6}),
        ({0: 0, 1: 0, 2: 0, 3: 0, 4: 0}, 9, {0: 2, 1: 2, 2: 2, 3: 1, 4: 1}),  # and the fourth, speculatively
        ({}, 9, {}),
    ):
        waiting = deque(requests.items())
        sent = dispatch(waiting, SamplingBudget(4, RefillRule(3, right)), outstanding, room, low=2)
        assert {index: len(given) for index, given in sent.items()} == expected
        assert len(waiting) == 8 - sum(expected.values())


def test_the_budget_without_a_condition_is_everything() -> None:
    budget = SamplingBudget(3, None)
    assert budget.allowed == 3
    for index in (2, 0, 1):
        assert not budget.over
        budget.judged(index, group(False))
    assert budget.over and budget.limit == 3
