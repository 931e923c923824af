"""Stage arithmetic and the pass-rate ledger, worked by hand."""

from __future__ import annotations

import json

import pytest
from fakes import group_of

from or1_megatron.config.schema import PlateauConfig, StageConfig
from or1_megatron.rl.fatal_checks import ResumeError
from or1_megatron.rl.stages import PassRateLedger, Plateau, StageSchedule


def stage(name: str, steps: int) -> StageConfig:
    return StageConfig(
        name=name, steps=steps, max_response_tokens=8, prompts_per_step=2, prompts_per_update=2, group_size=2
    )


def test_schedule() -> None:
    schedule = StageSchedule([stage("a", 3), stage("b", 2)])
    assert schedule.most_steps == 5
    assert [schedule.index(k) for k in range(4)] == [0, 0, 0, 1]
    assert [k for k in range(4) if schedule.begins(k)] == [0, 3]
    assert schedule.at(3).name == "b"
    with pytest.raises(ValueError, match="outside the schedule of 5 steps"):
        schedule.index(-1)
    assert schedule.enter(2)[0] == 0 and schedule.enter(3)[0] == 1
    assert schedule.index(4) == 1 and not schedule.begins(4) and schedule.stage_step(4) == 1
    assert schedule.over(5) and not schedule.over(4)
    with pytest.raises(ValueError, match="outside the schedule of 5 steps"):
        schedule.index(5)


def test_steps_that_change_on_a_resume() -> None:
    """Two steps into b, which began at 3. b may end later or now, not before; a is over."""
    schedule = StageSchedule([stage("a", 3), stage("b", 4), stage("c", 1)])
    schedule.enter(3)
    state = json.loads(json.dumps(schedule.state()))

    def again(a: int, b: int) -> StageSchedule:
        resumed = StageSchedule([stage("a", a), stage("b", b), stage("c", 1)])
        resumed.restore(state, 5)
        return resumed

    assert again(3, 9).index(5) == 1 and again(3, 9).most_steps == 13
    assert again(3, 2).index(5) == 2
    with pytest.raises(ResumeError, match="is of step 2 of stage 'b', whose steps are now 1; give it at least 2"):
        again(3, 1)
    with pytest.raises(ResumeError, match="stage 'a' ended after 3 steps, and its steps are now 4; put 3 back"):
        again(4, 4)


VALUES = [0.1, 0.3, 0.5, 0.5, 0.5, 0.7, 0.7, 0.6]
"""The worked example's values: blocks of two have the means 0.2, 0.5, 0.6, 0.65."""


@pytest.mark.parametrize(
    ("gain", "patience", "min_steps", "ends_after"),
    [
        (0.1, 1, 0, 6),  # 0.6 is not more than 0.1 above 0.5
        (0.1, 2, 0, 8),  # and 0.65 not above 0.6, the best by then
        (0.05, 1, 0, 8),
        (0.04, 1, 0, None),
        (0.31, 1, 0, 4),
        (0.1, 1, 7, 7),  # flat since 6, and never before min_steps
        (0.1, 3, 0, None),
    ],
)
def test_plateau_by_hand(gain: float, patience: int, min_steps: int, ends_after: int | None) -> None:
    """At every step the rule is saved and restored: it decides the same."""
    plateau = PlateauConfig(metric="m", window=2, gain=gain, patience=patience, min_steps=min_steps)
    stages = [stage("a", 99).model_copy(update={"plateau": plateau}), stage("b", 1)]
    schedule = StageSchedule(stages)
    ended = None
    for step, value in enumerate(VALUES, start=1):
        might_end = not schedule.surely_goes_on(step - 1)
        schedule.read({"other": 9.0})
        schedule.read({"m": value})
        state = json.loads(json.dumps(schedule.state()))
        schedule = StageSchedule(stages)
        schedule.restore(state, step)
        if schedule.index(step) == 1:
            assert might_end
            ended = step
            break
    assert ended == ends_after
    if ended is not None:
        schedule.enter(ended)
        assert schedule.state()["ends"] == ["plateau"]
        schedule.restore(schedule.state(), ended)  # fewer steps than its 99, and no complaint


def test_a_falling_metric_is_compared_with_the_best() -> None:
    """0.5 | 0.2 | 0.45 with window 1: the recovery is progress against the block before, but not against the best."""
    plateau = Plateau(PlateauConfig(metric="m", window=1, gain=0.0, patience=2))
    ended = []
    for value in (0.5, 0.2, 0.45):
        plateau.read({"m": value})
        ended.append(plateau.reached(1))
    assert ended == [False, False, True]


def test_ledger_counts_every_sample_of_the_stage() -> None:
    """In stage 1, p0: 3 of 6 right; p1: 3 of 4; p3: 4 of 4. p2: all right in stage 0, which says nothing of stage 1."""
    ledger = PassRateLedger()
    ledger.record(0, [group_of([1, 1], j=2)])
    ledger.record(1, [group_of([1, 0, 0, 0], j=0), group_of([1, 1], j=1), group_of([1, 1], j=3)])
    ledger.record(1, [group_of([1, 1], j=0), group_of([1, 0], j=1), group_of([1, 1], j=3)])
    again = PassRateLedger()
    again.restore(json.loads(json.dumps(ledger.state())))
    for one in (ledger, again):
        assert one.solved(0) == {"p2"}
        assert one.solved(1) == {"p3"}
        assert one.solved(2) == frozenset()
    assert ledger.state()["1"] == again.state()["1"] == {"p0": [3, 6], "p1": [3, 4], "p3": [4, 4]}


def test_ledger_state_is_a_copy() -> None:
    ledger = PassRateLedger()
    ledger.record(0, [group_of([1, 1])])
    before = ledger.state()
    ledger.record(0, [group_of([0, 1])])
    assert before == {"0": {"p0": [2, 2]}}


def test_pass_rates_outside_bounds() -> None:
    """Right answers: p0 2 of 4, p1 1 of 4, p2 4 of 4, p3 0 of 4."""
    ledger = PassRateLedger()
    ledger.record(
        0, [group_of([1, 1, 0, 0]), group_of([1, 0, 0, 0], j=1), group_of([1] * 4, j=2), group_of([0] * 4, j=3)]
    )
    assert ledger.outside(0, 0.0, 1.0) == frozenset()
    assert ledger.outside(0, 0.25, 1.0) == {"p3"}
    assert ledger.outside(0, 0.3, 0.9) == {"p1", "p2", "p3"}
    assert ledger.outside(1, 0.3, 0.9) == frozenset()
