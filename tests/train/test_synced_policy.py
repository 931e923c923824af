"""Who has the devices: the exact order in which trainer and engines give them up and take them.

Stand-ins for ranks, engines and their pool write down what is called. Not proven here: that memory is free after it
(tests/parallel/test_offload.py, the self-test's check "sleep"), and real engines (test_handoff_goes_wrong.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.errors import SendError
from or1_megatron.handoff.probe import Probe
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rollout.engine_group import EngineError
from or1_megatron.trainer.synced_policy import TRANSITIONS, DeviceSharing, SyncedPolicy

TRAINER = ["restore parameters gradients optimizer"]
HANDOFF = ["offload optimizer gradients", "sync_parameters", "check_replicas"]
SENT = ["wake weights", "send", "offload parameters", "wake kv_cache", "certify"]
REPLACED = ["offload optimizer gradients parameters", "start engine", "leave_engines", "sleep"]
AGAIN = [*REPLACED, "restore parameters"]


class Diary:
    """Ranks, engines, their pool and the rollouts in one: notes each call, and fails at the first call of one kind."""

    def __init__(self, sharing: DeviceSharing, fails_in: str = "") -> None:
        self.calls: list[str] = []
        self.fails_in, self.lost = fails_in, False
        self.handles: list[object] = ["engine 0"]
        config = HandoffConfig(probe_every_steps=0)
        probe = Probe(config, "float32", 16, 8)
        parts: Any = self
        self.policy = SyncedPolicy(parts, parts, parts, parts, parts, config, probe, BatchLayout(1, 64, 1), sharing)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            self.fails_in, self.lost = "", True
            raise SendError("an engine has died") if call == "send" else EngineError("an engine has died")

    def call(self, verb: str, *arguments: Any) -> int:
        self.note(" ".join([verb, *(each for each in arguments if isinstance(each, str))]))
        return 0

    def sleep(self) -> None:
        self.note("sleep")

    def wake_up(self, tags: list[str]) -> None:
        self.note(f"wake {tags[0]}")

    def certify(self, version: int) -> None:
        self.note("certify")

    def restart_lost(self, make_room: Callable[[], None]) -> list[int]:
        if not self.lost:
            return []
        make_room()
        self.note("start engine")
        self.lost, self.handles[0] = False, "engine 0, restarted"
        return [0]

    def rejoin(self, handles: list[object]) -> None:
        self.note(f"rejoin {handles[0]}")

    def steps(self) -> list[str]:
        """Hand off as at the start, then compute and hand off as in a step; return the calls of the second."""
        self.policy.hand_off(0)
        self.calls.clear()
        self.policy.take_devices()
        self.policy.take_devices()  # the second changes nothing
        self.policy.hand_off(1)
        return self.calls


def test_a_step_where_nothing_is_shared_moves_nothing() -> None:
    assert Diary(DeviceSharing(False, False)).steps() == ["sync_parameters", "check_replicas", "send", "certify"]


def test_a_step_on_shared_devices() -> None:
    assert Diary(DeviceSharing(True, True)).steps() == ["sleep", *TRAINER, *HANDOFF, *SENT]


def test_a_trainer_that_offloads_beside_engines_that_stay_awake() -> None:
    calls = Diary(DeviceSharing(False, True)).steps()
    assert calls == [*TRAINER, *HANDOFF, "send", "offload parameters", "certify"]


@pytest.mark.parametrize("fails_in", SENT)
def test_an_engine_lost_in_a_handoff(fails_in: str) -> None:
    """The handoff is done again; the manager hears of the new engine once, when it serves."""
    diary = Diary(DeviceSharing(True, True))
    diary.policy.hand_off(0)
    diary.calls.clear()
    diary.fails_in = fails_in
    diary.policy.take_devices()
    diary.policy.hand_off(1)
    before = SENT[: SENT.index(fails_in) + 1]
    expected = ["sleep", *TRAINER, *HANDOFF, *before, *AGAIN, *SENT, "rejoin engine 0, restarted"]
    assert diary.calls == expected
    diary.calls.clear()
    diary.policy.take_devices()
    diary.policy.hand_off(2)
    assert diary.calls == ["sleep", *TRAINER, *HANDOFF, *SENT]


def test_an_engine_lost_before_the_trainer_computes() -> None:
    diary = Diary(DeviceSharing(True, True), "sleep")
    diary.policy.hand_off(0)
    diary.calls.clear()
    diary.policy.take_devices()
    assert diary.calls == ["sleep", *REPLACED, *TRAINER]


def test_an_engine_lost_in_a_rollout_is_brought_to_the_weights() -> None:
    diary = Diary(DeviceSharing(True, True))
    diary.policy.hand_off(5)
    diary.policy.revive()  # none is lost
    diary.calls.clear()
    diary.lost = True
    diary.policy.revive()
    assert diary.calls == [*REPLACED, *TRAINER, *HANDOFF, *SENT, "rejoin engine 0, restarted"]
    assert diary.policy._version == 5


def test_what_was_moved_for_a_new_engine_comes_back_to_a_trainer_that_never_offloads() -> None:
    diary = Diary(DeviceSharing(engines_sleep=True, trainer_offloads=False), "send")
    diary.policy.hand_off(0)
    diary.calls.clear()
    diary.policy.take_devices()
    assert diary.calls == ["sleep", *TRAINER]


def test_the_optimizer_restarts_when_the_trainer_has_the_devices() -> None:
    diary = Diary(DeviceSharing(True, True))
    diary.policy.hand_off(0)
    diary.calls.clear()
    diary.policy.restart_optimizer()
    assert diary.calls == []
    diary.policy.take_devices()
    diary.policy.take_devices()
    assert diary.calls == ["sleep", *TRAINER, "restart_optimizer"]


def test_other_transitions_are_refused() -> None:
    policy = Diary(DeviceSharing(True, True)).policy
    for before, after in itertools.product(TRANSITIONS, TRANSITIONS):
        policy._devices = before
        if after not in TRANSITIONS[before]:
            with pytest.raises(RuntimeError, match=f"from '{before}' to '{after}'; expected "):
                policy._pass_devices(after)
    assert {state: set(after) for state, after in TRANSITIONS.items()} == {
        "trainer": {"handoff", "neither"},
        "handoff": {"engines", "neither"},
        "engines": {"trainer", "neither"},
        "neither": {"trainer", "handoff"},
    }
