"""Stage arithmetic and the pass-rate ledger, worked by hand."""

from __future__ import annotations

import json

import pytest
from fakes import group_of

from or1_megatron.config import StageConfig
from or1_megatron.rl.stages import PassRateLedger, StageSchedule


def stage(name: str, steps: int) -> StageConfig:
    return StageConfig(
        name=name, steps=steps, max_response_tokens=8, prompts_per_step=2, prompts_per_update=2, group_size=2
    )


def test_schedule() -> None:
    schedule = StageSchedule([stage("a", 3), stage("b", 2)])
    assert schedule.total_steps == 5
    assert [schedule.index(k) for k in range(5)] == [0, 0, 0, 1, 1]
    assert [k for k in range(6) if schedule.begins(k)] == [0, 3]
    assert schedule.at(3).name == "b"
    for outside in (-1, 5):
        with pytest.raises(ValueError, match="outside the schedule of 5 steps"):
            schedule.index(outside)


def test_ledger_counts_every_sample_of_the_stage() -> None:
    """In stage 1, p0: 3 of 6 right; p1: 3 of 4; p3: 4 of 4. p2: all right in stage 0, which says nothing of stage 1."""
    ledger = PassRateLedger()
    ledger.record(0, [group_of([1, 1], j=2)])
    ledger.record(1, [group_of([1, 0, 0, 0], j=0), group_of([1, 1], j=1), group_of([1, 1], j=3)])
    ledger.record(1, [group_of([1, 1], j=0), group_of([1, 0], j=1), group_of([1, 1], j=3)])
    again = PassRateLedger()
    again.restore(json.loads(json.dumps(ledger.state())))
    for each in (ledger, again):
        assert each.solved(0) == {"p2"}
        assert each.solved(1) == {"p3"}
        assert each.solved(2) == frozenset()
    assert ledger.state()["1"] == again.state()["1"] == {"p0": [3, 6], "p1": [3, 4], "p3": [4, 4]}


def test_ledger_state_is_a_copy() -> None:
    ledger = PassRateLedger()
    ledger.record(0, [group_of([1, 1])])
    before = ledger.state()
    ledger.record(0, [group_of([0, 1])])
    assert before == {"0": {"p0": [2, 2]}}
