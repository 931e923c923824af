"""Seeds, order and the report's arithmetic; no engine."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from engine_fixtures import prompt

from or1_megatron.rollout.sampler import Ration, assemble_groups, plan_requests, request_seed, union_s
from or1_megatron.types import Completion, Group, Sampling, Until, Verdict, VersionSpan

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
    code = "from or1_megatron.rollout.sampler import request_seed; print(request_seed(3, 0, 15))"
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


def test_groups_come_in_order_of_prompts_and_samples_whatever_the_order_of_arrival() -> None:
    prompts = [prompt([2], name="same"), prompt([2, 3], name="same")]  # one problem may stand in a batch twice
    arrival = [(1, 1), (0, 0), (1, 0), (0, 1)]
    completions = {key: completion(f"prompt{key[0]}", key[1]) for key in arrival}
    verdicts = {key: Verdict(float(key[0] == key[1]), "right", "", "", 0.0) for key in arrival}
    groups = assemble_groups(prompts, 2, completions, verdicts)
    assert [[(c.problem_id, c.sample_index) for c in group.completions] for group in groups] == [
        [("prompt0", 0), ("prompt0", 1)],
        [("prompt1", 0), ("prompt1", 1)],
    ]
    assert [group.rewards.tolist() for group in groups] == [[1.0, 0.0], [0.0, 1.0]]
    del verdicts[1, 0]
    with pytest.raises(KeyError, match=r"\(1, 0\)"):
        assemble_groups(prompts, 2, completions, verdicts)


def test_union_of_intervals_counts_overlap_once() -> None:
    assert union_s([]) == 0.0
    assert union_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (3.0, 3.5)]) == pytest.approx(4.5)


def group(kept: bool) -> Group:
    """Kept by ``right``: its one response is."""
    return Group(prompt([2]), (completion("p", 0),), (Verdict(float(kept), "right" if kept else "wrong", "", "", 0.0),))


def right(judged: Group) -> bool:
    return bool(judged.rewards[0])


def test_ration_worked_example() -> None:
    """The docstring's: 3 wanted of 8, in this order of verdicts."""
    ration = Ration(8, Until(3, right))
    seen = [ration.allowed]
    for index, kept in ((1, False), (3, True), (0, True), (2, False), (4, True)):
        assert not ration.over and ration.needed == 8
        ration.judged(index, group(kept))
        seen.append(ration.allowed)
    assert ration.over and ration.needed == 5
    assert seen == [3, 4, 4, 4, 5, 5]


def test_ration_does_not_depend_on_the_order_of_verdicts() -> None:
    """500 drawn cases: judged in any order that the ration lets out, the result is the shortest run of prompts with
    enough groups kept, or all; what is let out never falls short of it, and never goes back."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        prompts, wanted = int(rng.integers(1, 20)), int(rng.integers(1, 8))
        kept = rng.random(prompts) < rng.random()
        found = np.flatnonzero(kept.cumsum() >= wanted)
        expected = int(found[0]) + 1 if found.size else prompts
        ration, judged = Ration(prompts, Until(wanted, right, expected_rejected=rng.random())), set[int]()
        while not ration.over:
            allowed = ration.allowed
            open_ones = [index for index in range(allowed) if index not in judged]
            index = int(rng.choice(open_ones))  # there is always one
            ration.judged(index, group(bool(kept[index])))
            judged.add(index)
        assert ration.needed == expected and set(range(expected)) <= judged


def test_ration_without_a_condition_is_everything() -> None:
    ration = Ration(3, None)
    assert ration.allowed == 3
    for index in (2, 0, 1):
        assert not ration.over
        ration.judged(index, group(False))
    assert ration.over and ration.needed == 3
