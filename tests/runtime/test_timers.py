"""The step timer on a clock that the test sets. Not proven here: the precision of the machine's clock."""

from __future__ import annotations

import pytest

from or1_megatron.runtime.timers import StepTimer


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_verbs_accumulate_and_laps_follow_without_gap() -> None:
    """Lap 1: 1 s idle, verify 2 s, update 3 s, verify 4 s: wall 10. Lap 2 begins inside report, after its first 5 s."""
    clock = Clock()
    timer = StepTimer(clock)
    clock.now_s += 1
    for verb, seconds in [("verify", 2), ("update", 3), ("verify", 4)]:
        with timer(verb):
            clock.now_s += seconds
    with timer("report"):
        clock.now_s += 5
        assert timer.lap() == (15.0, {"verify": 6.0, "update": 3.0, "report": 5.0})
        clock.now_s += 7
    assert timer.lap() == (7.0, {"report": 7.0})
    assert timer.lap() == (0.0, {})


def test_verbs_do_not_nest() -> None:
    timer = StepTimer()
    with pytest.raises(RuntimeError, match="'inner' started inside verb 'outer'"), timer("outer"), timer("inner"):
        pass
    with timer("after"):  # the failure has closed what it left
        pass


def test_a_failing_verb_is_timed_too() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with pytest.raises(KeyError), timer("verify"):
        clock.now_s += 2
        raise KeyError
    assert timer.lap() == (2.0, {"verify": 2.0})
