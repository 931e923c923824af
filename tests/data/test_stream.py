"""The stream's laws, checked by counting: what an epoch holds, that no batch holds a problem twice, and that a
restored stream goes on exactly. Nothing here says that the order is a good shuffle."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from or1_megatron.data.stream import MixtureStream, PromptSource
from or1_megatron.types import Prompt
from or1_verify.problems.rows import DataError
from or1_verify.types import Message, Problem


def prompts(prefix: str, count: int, truth: str = '["1"]') -> list[Prompt]:
    return [
        Prompt(
            Problem(f"{prefix}{n}", prefix, "math", (Message("user", "q"),), truth, {}, f"{prefix}.jsonl:{n + 1}"),
            np.array([n, 1, 2], dtype=np.int32),
        )
        for n in range(count)
    ]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.problem.id for prompt in batch]


def test_an_epoch_holds_each_problem_as_often_as_its_source_repeats() -> None:
    """7 problems twice and 6 once are 20 entries: five takes of 4 pass exactly one epoch, give or take what waits."""
    stream = MixtureStream([PromptSource(prompts("code", 7), 2), PromptSource(prompts("math", 6))], seed=5)
    drawn: Counter[str] = Counter()
    while stream.state()["position"] < 20:
        drawn.update(ids(stream.take(1)))
    assert drawn == {**{f"code{n}": 2 for n in range(7)}, **{f"math{n}": 1 for n in range(6)}}


def test_takes_cross_epochs_without_repeating_or_losing_a_problem() -> None:
    """Over 60 takes of 5 from 6 problems (50 epochs), no duplicate in a batch, counts differ by 2 at most."""
    stream = MixtureStream([PromptSource(prompts("p", 6))], seed=1)
    drawn: Counter[str] = Counter()
    for _ in range(60):
        batch = ids(stream.take(5))
        assert len(set(batch)) == 5
        drawn.update(batch)
    assert sum(drawn.values()) == 300
    assert max(drawn.values()) - min(drawn.values()) <= 2


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int) -> list[str]:
        return ids(MixtureStream([PromptSource(prompts("p", 50))], seed=seed).take(50))

    assert order(1) == order(1)
    assert order(1) != order(2)
    stream = MixtureStream([PromptSource(prompts("p", 50))], seed=1)
    assert ids(stream.take(50)) != ids(stream.take(50))


@pytest.mark.parametrize("steps_before", [0, 1, 3, 7, 20])
def test_a_restored_stream_goes_on_exactly(steps_before: int) -> None:
    """The state passes through JSON, with exclusions, repeats and entries that wait in it."""
    sources = [PromptSource(prompts("code", 5), 3), PromptSource(prompts("math", 8))]
    stream = MixtureStream(sources, seed=9)
    for step in range(steps_before):
        stream.take(6)
        if step == 2:
            stream.exclude(frozenset({"code1", "math7"}))
    state = json.loads(json.dumps(stream.state()))
    restored = MixtureStream(sources, seed=9)
    restored.take(4)  # where it stood before must not matter
    restored.restore(state)
    for _ in range(30):
        assert ids(stream.take(6)) == ids(restored.take(6))
    assert stream.state() == restored.state()


def test_excluded_problems_never_return() -> None:
    stream = MixtureStream([PromptSource(prompts("p", 10), 2)], seed=3)
    stream.take(7)
    assert stream.exclude(frozenset({"p0", "p1"})) == 8
    assert stream.exclude(frozenset({"p1", "p2"})) == 7
    drawn = {problem for _ in range(20) for problem in ids(stream.take(7))}
    assert drawn == {f"p{n}" for n in range(3, 10)}


def test_impossible_requests_are_refused_with_the_numbers() -> None:
    stream = MixtureStream([PromptSource(prompts("p", 4))], seed=0)
    stream.exclude(frozenset({"p0"}))
    with pytest.raises(ValueError, match="asked for 4 different problems, but only 3 are left of 4"):
        stream.take(4)
    with pytest.raises(ValueError, match="would leave none of 4"):
        stream.exclude(frozenset({"p1", "p2", "p3"}))
    assert len(stream.take(3)) == 3
    with pytest.raises(ValueError, match="'elsewhere'"):
        stream.exclude(frozenset({"elsewhere"}))


def test_restoring_onto_changed_data_is_refused() -> None:
    state = MixtureStream([PromptSource(prompts("p", 4))], seed=0).state()
    changed = {
        "one more": [PromptSource(prompts("p", 5))],
        "another gold": [PromptSource(prompts("p", 4, truth='["2"]'))],
        "another repeat": [PromptSource(prompts("p", 4), 2)],
        "another order": [PromptSource(prompts("p", 4)[::-1])],
    }
    for sources in changed.values():
        with pytest.raises(DataError, match="training data changed since the checkpoint"):
            MixtureStream(sources, seed=0).restore(state)
    with pytest.raises(DataError, match="seed 0, this run's is 1"):
        MixtureStream([PromptSource(prompts("p", 4))], seed=1).restore(state)


def test_the_state_of_a_large_stream_is_small() -> None:
    """50,000 problems, half of them excluded at random: 6 KiB of bitmap, not a list of ids."""
    stream = MixtureStream([PromptSource(prompts("p", 50_000))], seed=0)
    stream.take(256)
    chosen = np.random.default_rng(0).random(50_000) < 0.5
    stream.exclude(frozenset(f"p{n}" for n in np.flatnonzero(chosen)))
    assert len(json.dumps(stream.state())) < 10_000


def test_a_mixture_begins_a_new_epoch_of_its_own_sources() -> None:
    """From 4 + 3 problems to the second source alone, twice each: 6 entries an epoch; and back, and restored."""
    stream = MixtureStream([PromptSource(prompts("a", 4)), PromptSource(prompts("b", 3))], seed=2)
    before = stream.state()
    stream.mix([1, 1])
    assert stream.state() == before and stream.left == 7
    stream.take(2)
    stream.mix([0, 2])
    assert stream.left == 3 and (stream.state()["epoch"], stream.state()["position"]) == (1, 0)
    again = MixtureStream([PromptSource(prompts("a", 4)), PromptSource(prompts("b", 3))], seed=2)
    again.restore(json.loads(json.dumps(stream.state())))
    drawn: Counter[str] = Counter()
    while stream.state()["position"] < 6:
        batch = ids(stream.take(1))
        assert batch == ids(again.take(1))
        drawn.update(batch)
    assert drawn == {f"b{n}": 2 for n in range(3)}
    with pytest.raises(DataError, match=r"only 3 are left of 7 .*4 of sources that this stage's mixture leaves out"):
        stream.take(4)
    stream.mix([1, 0])
    assert {id_[0] for _ in range(8) for id_ in ids(stream.take(2))} == {"a"}


def test_what_is_taken_first_does_not_depend_on_how_much_is() -> None:
    """What refill relies on: with repeats and across epochs, the first n of a larger take are those of take(n)."""
    for n in range(1, 7):
        sources = [PromptSource(prompts("a", 4), 3), PromptSource(prompts("b", 3))]
        large, small = MixtureStream(sources, seed=2), MixtureStream(sources, seed=2)
        for _ in range(20):
            before = large.state()
            first = ids(large.take(7))[:n]
            large.restore(before)
            assert first == ids(large.take(n)) == ids(small.take(n))
        assert large.state() == small.state()
