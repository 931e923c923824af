"""Who has the devices: the exact order in which trainer and engines give them up and take them.

Stand-ins for ranks, engines and their pool write down what is called. Not proven here: that memory is free after it
(tests/parallel/test_offload.py, the self-test's check "sleep"), and real engines (test_handoff_goes_wrong.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.errors import PartLost
from or1_megatron.handoff.failures import EngineStrayed, PolicyNotFinite, SendError
from or1_megatron.handoff.probe import Probe
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.rollout.engine_group import EngineError
from or1_megatron.trainer.synced_policy import TRANSITIONS, DeviceSharing, SyncedPolicy
from or1_megatron.types import TokenScores

TRAINER = ["restore parameters gradients optimizer"]
HANDOFF = ["offload optimizer gradients", "check_replicas"]
SENT = ["wake weights", "send", "offload parameters", "wake kv_cache", "resume"]
REPLACED = ["offload optimizer gradients parameters", "start engine", "leave_engines", "sleep"]
AGAIN = [*REPLACED, "restore parameters"]


class Diary:
    """Ranks, engines, their pool and the rollouts in one: notes each call, and fails at the first call of one kind."""

    def __init__(self, sharing: DeviceSharing, fails_in: str = "", probe_every_steps: int = 0) -> None:
        self.calls: list[str] = []
        self.fails_in, self.lost = fails_in, False
        self.handles: list[object] = ["engine 0"]
        config = HandoffConfig(probe_every_steps=probe_every_steps)
        probe = Probe(config, "float32", 16, 8)
        parts: Any = self
        self.policy = SyncedPolicy(parts, parts, parts, parts, parts, config, probe, BatchLayout(1, 64, 1), sharing)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            self.fails_in, self.lost = "", True
            raise SendError("an engine has died") if call == "send" else EngineError("an engine has died")

    def call(self, verb: str, *arguments: Any, per_replica: Any = None) -> int:
        self.note(" ".join([verb, *(each for each in arguments if isinstance(each, str))]))
        return 0

    def sleep(self) -> None:
        self.note("sleep")

    def wake_up(self, tags: list[str]) -> None:
        self.note(f"wake {tags[0]}")

    def resume_generation(self, version: int) -> None:
        self.note("resume")

    def restart_lost_engines(self, make_room: Callable[[], None]) -> list[int]:
        if not self.lost:
            return []
        make_room()
        self.note("start engine")
        self.lost, self.handles[0] = False, "engine 0, restarted"
        return [0]

    def engines_restarted(self, handles: list[object]) -> None:
        self.note(f"restarted {handles[0]}")

    def do(self, *methods: str) -> list[str]:
        """Call methods of the policy; return what they called."""
        self.calls.clear()
        for version, method in enumerate(methods):
            getattr(self.policy, method)(*([version] if method == "hand_off" else []))
        return self.calls


SHARED, APART, BESIDE = DeviceSharing(True, True), DeviceSharing(False, False), DeviceSharing(False, True)
STEP = ["sleep", *TRAINER, *HANDOFF, *SENT]
CASES = {
    "nothing is shared": (APART, ["hand_off"], ["check_replicas", "send", "resume"]),
    "shared devices": (SHARED, ["take_devices", "take_devices", "hand_off"], STEP),
    "only the trainer moves": (BESIDE, ["hand_off"], [*TRAINER, *HANDOFF, "send", "offload parameters", "resume"]),
    "no engine is lost": (SHARED, ["restart_lost_engines"], []),
    "the optimizer waits": (SHARED, ["restart_optimizer"], []),
    "the optimizer": (
        SHARED,
        ["restart_optimizer", "take_devices", "take_devices"],
        ["sleep", *TRAINER, "restart_optimizer"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step(case: str) -> None:
    """After a first handoff."""
    sharing, methods, expected = CASES[case]
    diary = Diary(sharing)
    diary.do("hand_off")
    assert diary.do(*methods) == expected


@pytest.mark.parametrize("fails_in", SENT)
def test_an_engine_lost_in_a_handoff(fails_in: str) -> None:
    """The handoff is done again; the manager hears of the new engine once, when it serves."""
    diary = Diary(SHARED)
    diary.do("hand_off")
    diary.fails_in = fails_in
    before = SENT[: SENT.index(fails_in) + 1]
    told = "restarted engine 0, restarted"
    assert diary.do("hand_off") == ["sleep", *TRAINER, *HANDOFF, *before, *AGAIN, *SENT, told]
    assert diary.do("take_devices", "hand_off") == STEP


def test_an_engine_lost_before_the_trainer_computes_or_in_a_rollout() -> None:
    diary = Diary(SHARED, "sleep")
    diary.do("hand_off")
    assert diary.do("take_devices") == ["sleep", *REPLACED, *TRAINER]
    diary.do("hand_off")
    diary.lost = True
    # The engine's handle is the same in this test.
    assert diary.do("restart_lost_engines") == [*REPLACED, *TRAINER, *HANDOFF, *SENT]
    assert diary.policy._version == 0


@pytest.mark.parametrize("method", ["score", "score_reference", "update"])
def test_the_ranks_compute_when_they_have_the_devices(method: str) -> None:
    diary = Diary(SHARED)
    diary.do("hand_off")
    diary.calls, diary.fails_in = [], method
    batch = SimpleNamespace(ranks=[], token_count=0)
    with pytest.raises(EngineError):  # no rank is there to answer
        getattr(diary.policy, method)(batch, None)
    assert diary.calls == ["sleep", *TRAINER, method]


def test_every_second_handoff_is_probed() -> None:
    """An engine that strays after the first one may be repaired by a restart."""
    policy: Any = Diary(APART, probe_every_steps=2).policy
    zeros = [np.zeros(each.size - 1, np.float32) for each in policy._probe.token_ids]
    policy.score = lambda *_: SimpleNamespace(log_probs=zeros)
    policy._engines.score_prompts = lambda _: [[each + (policy._handoffs == 2) for each in zeros]]
    assert [policy.hand_off(0).probe_max_abs_diff for _ in range(2)] == [0.0, None]
    with pytest.raises(EngineStrayed):
        policy.hand_off(0)


def test_what_was_moved_for_a_new_engine_comes_back_to_a_trainer_that_never_offloads() -> None:
    diary = Diary(DeviceSharing(engines_sleep=True, trainer_offloads=False), "send")
    diary.do("hand_off")
    assert diary.do("take_devices") == ["sleep", *TRAINER]


def test_other_transitions_are_refused() -> None:
    policy = Diary(SHARED).policy
    for before, after in itertools.product(TRANSITIONS, TRANSITIONS):
        policy._devices = before
        if after not in TRANSITIONS[before]:
            with pytest.raises(RuntimeError, match=f"from '{before}' to '{after}'; expected "):
                policy._pass_devices(after)


@pytest.mark.parametrize(("version", "said"), [(0, "before any training: the weights in model"), (7, "after step 7")])
def test_a_policy_that_is_not_finite_is_not_blamed_on_an_engine(
    version: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent, and no restart follows."""
    diary = Diary(APART, probe_every_steps=1)
    scores = TokenScores((np.array([-1.0, np.nan], dtype=np.float32),), ())
    monkeypatch.setattr(diary.policy, "score", lambda *_: scores)
    with pytest.raises(PolicyNotFinite, match=rf"log-probs of the probe are not finite {said}") as raised:
        diary.policy.hand_off(version)
    assert diary.calls == [] and not isinstance(raised.value, PartLost)
