"""Whole rollouts through the real manager, two real engines and the real math verifier, on Ray.

The engines' model is random, so the problems' gold answers are made to be right by chance: one digit each.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from engine_fixtures import MAX_MODEL_TOKENS, RUN_ID, TinyModel, prompt, rollout_config
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from waiting import PATIENCE_S, wait_until

from or1_megatron.rollout.client import RolloutsClient
from or1_megatron.rollout.engine_group import find_lost_engines
from or1_megatron.rollout.engine_pool import EngineError, EnginePool
from or1_megatron.rollout.engine_thread import EngineFailed
from or1_megatron.rollout.manager import RolloutError, RolloutManager
from or1_megatron.runtime.heartbeat import beats_folder, read_beats
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Completion, Group, Prompt, RefillRule, Sampling
from or1_verify.config import VerifyConfig

SAMPLING = Sampling(1.0, 1.0, 48)
PROMPTS = [prompt([2, 5 + index, 27], name=f"problem{index}", answer=f'["{index}"]') for index in range(5)]


@pytest.fixture(scope="module")
def shared_client(engine_pool: EnginePool) -> Iterator[RolloutsClient]:
    verify = VerifyConfig(workers=1, timeout_s=60.0)
    client = RolloutsClient(engine_pool, rollout_config(), verify, frozenset({"math"}), RUN_ID)
    yield client
    client.close()


@pytest.fixture
def rollouts(shared_client: RolloutsClient, monkeypatch: pytest.MonkeyPatch) -> RolloutsClient:
    monkeypatch.setattr("or1_megatron.rollout.client._RESPONSES_S", PATIENCE_S)
    shared_client.trained()  # what tests before it have collected
    return shared_client


def test_two_engines_give_whole_groups_with_verdicts(rollouts: RolloutsClient) -> None:
    """120 requests, more than the engines hold at once (2 * 36). Verdicts' mathematics is tested in verify."""
    started_s = time.time()
    rollouts.roll_out(PROMPTS, 24, SAMPLING, seed=1)
    rollouts.wait_decoded()
    wait_until(lambda: rollouts.progress() == (120, 120), "the manager to tell its progress")
    groups, report = rollouts.collect()
    assert [group.prompt.problem.id for group in groups] == [p.problem.id for p in PROMPTS]
    for group in groups:
        assert [c.sample_index for c in group.completions] == list(range(24))
        assert {c.problem_id for c in group.completions} == {group.prompt.problem.id}
        for completion, verdict in zip(group.completions, group.verdicts, strict=True):
            assert (verdict.status == "truncated") == completion.truncated
            assert verdict.status in ("truncated", "no_answer", "wrong", "right")
            assert verdict.reward == float(verdict.status == "right")
    completions = [c for group in groups for c in group.completions]
    assert {c.engine for c in completions} == {0, 1}
    per_engine = np.bincount([c.engine for c in completions])
    assert per_engine.min() >= 36  # the first 72 are dealt out evenly; who is faster gets more of the rest
    assert report.response_tokens == sum(len(c.token_ids) for c in completions)
    assert report.prompt_tokens == 120 * 3
    assert max(report.engine_busy_s) <= report.decode_s + 1e-6 <= sum(report.engine_busy_s) + 1e-5
    assert report.decode_s <= report.wall_s <= time.time() - started_s
    assert report.verifier_retries == 0


def test_reasoning_that_the_prompt_opened_must_be_closed(rollouts: RolloutsClient) -> None:
    """The same responses, without a tag of their own, twice: the template has opened the first prompt's reasoning."""
    opened, plain = replace(PROMPTS[0], opened="<think>"), PROMPTS[0]
    details = []
    for asked in (opened, plain):
        rollouts.roll_out([asked], 96, SAMPLING, seed=1)
        rollouts.wait_decoded()
        ((group,), _) = rollouts.collect()
        ended = zip(group.completions, group.verdicts, strict=True)
        details.append({v.detail for c, v in ended if v.status != "truncated" and "think>" not in c.text})
        rollouts.trained()
    unclosed = {"the reasoning is never closed"}
    assert details[0] == unclosed and details[1] and not details[1] & unclosed


@dataclass
class ByValue:
    """A function that goes to an actor as code: this module cannot be imported there."""

    function: Callable[[Group], bool]

    def __call__(self, group: Group) -> bool:
        return self.function(group)

    def __reduce__(self) -> tuple[Any, ...]:
        return ray.cloudpickle.loads, (ray.cloudpickle.dumps(self.function),)


def idle(pool: EnginePool) -> bool:
    return not any(
        ray.get(handle.call.remote("__getattribute__", "pending"), timeout=PATIENCE_S) for handle in pool.handles
    )


def test_refill_ends_with_the_group_that_was_still_wanted(rollouts: RolloutsClient, engine_pool: EnginePool) -> None:
    """20 prompts of 6 samples, 3 groups wanted. Whatever the engines were sent on to beyond the result is thrown away
    and off the engines. That a group of real verdicts is judged by its advantages: rl/test_stage_runs."""
    first_is_even = ByValue(lambda group: len(group.completions[0].token_ids) % 2 == 0)  # as about half of them are
    more = [prompt([2, 5 + index, 27], name=f"problem{index}") for index in range(20)]
    for expected_rejected in (0.0, 0.9):
        started_s = time.time()
        rollouts.roll_out(more, 6, SAMPLING, 5, RefillRule(3, first_is_even, expected_rejected))
        rollouts.wait_decoded()
        groups, report = rollouts.collect()
        assert [group.prompt.problem.id for group in groups] == [f"problem{i}" for i in range(len(groups))]
        assert len(groups) < 20 and sum(map(first_is_even, groups)) == 3 and first_is_even(groups[-1])
        assert idle(engine_pool) and report.surplus_responses > 0
        assert report.response_tokens == sum(len(c.token_ids) for group in groups for c in group.completions)
        assert 0 < report.decode_s <= time.time() - started_s  # what is thrown away may be decoded after the result
    rollouts.roll_out(more[:3], 6, SAMPLING, 5, RefillRule(4, first_is_even))
    assert len(rollouts.collect()[0]) == 3  # all that there are


def test_several_roll_outs_at_a_time(rollouts: RolloutsClient) -> None:
    with pytest.raises(RolloutError, match="collect: no rollout is under way"):
        rollouts.collect()
    with pytest.raises(ValueError, match="0 prompts"):
        rollouts.roll_out([], 4, SAMPLING, seed=1)
    rollouts.roll_out(PROMPTS, 2, SAMPLING, seed=1)
    with pytest.raises(RolloutError, match="seed 1 gives two requests the same seed"):
        rollouts.roll_out(PROMPTS, 2, SAMPLING, seed=1)
    second = rollouts.roll_out(PROMPTS, 2, SAMPLING, seed=2)
    urgent = rollouts.roll_out(PROMPTS[:1], 3, SAMPLING, seed=3, urgent=True)
    assert len(rollouts.collect(urgent)[0]) == 1 and len(rollouts.collect()[0]) == 5
    assert len(rollouts.collect(second)[0][0].completions) == 2


def kept(engine: Any) -> list[Any]:
    """What the engine would hand to a successor of its manager. From now on it answers callers of number 0 again."""
    found: list[Any] = unpack(ray.get(engine.switch_manager.remote(0), timeout=PATIENCE_S))
    return found


def test_a_manager_that_dies_is_replaced(rollouts: RolloutsClient, engine_pool: EnginePool) -> None:
    """In a rollout, and between two: the successor gives the groups of an undisturbed rollout of the same seed, and
    has nothing sampled again that was finished.

    That the very same tokens come out holds for this batch; vLLM promises no more than equal random numbers.
    """
    reasons: list[str] = []
    tokens = []
    finished, died_s = 0, 0.0
    sampling = Sampling(1.0, 1.0, 100)
    with pytest.raises(RolloutError, match="no rollout is under way"):
        rollouts.wait_decoded()
    rollouts.allow_restarts(lambda: None, reasons.append)
    for deadly in (False, True):
        rollouts.roll_out(PROMPTS, 24, sampling, seed=9)
        if deadly:
            wait_until(lambda: rollouts.progress()[0] > 0, "the first response")
            finished = rollouts.progress()[0]
            ray.kill(rollouts._manager, no_restart=True)
            died_s = time.time()
        groups, report = rollouts.collect()
        tokens.append([c.token_ids.tolist() for group in groups for c in group.completions])
        assert report.surplus_responses == 0
    assert tokens[0] == tokens[1]
    assert sum(c.finished_s < died_s for group in groups for c in group.completions) >= finished
    ray.kill(rollouts._manager, no_restart=True)
    rollouts.roll_out(PROMPTS, 2, SAMPLING, seed=3)
    assert len(rollouts.collect()[0]) == 5
    assert len(reasons) == 2
    wait_until(lambda: not any(map(kept, engine_pool.handles)), "the engines to release what was collected")
    assert idle(engine_pool)


def test_engines_forget_what_a_dead_manager_did_not_release(rollouts: RolloutsClient, engine_pool: EnginePool) -> None:
    """It dies when the client has collected, and before it has told the engines so."""
    rollouts.allow_restarts(lambda: None)
    rollouts.roll_out(PROMPTS, 2, SAMPLING, seed=6)
    rollouts.wait_decoded()
    rollouts._under_way.clear()  # as ``collect`` leaves it
    rollouts._restart_lost_manager("its process died")
    assert wait_until(lambda: not any(map(kept, engine_pool.handles)), "the engines to release what was collected")


def test_a_manager_that_is_out_of_reach_is_killed_when_it_is_replaced(
    rollouts: RolloutsClient, engine_pool: EnginePool
) -> None:
    """Ray reports an actor that it cannot reach for a moment as lost; it goes on, and asks the engines."""
    rollouts.allow_restarts(lambda: None)
    rollouts.roll_out(PROMPTS, 2, SAMPLING, seed=4)
    out_of_reach = rollouts._manager
    rollouts._restart_lost_manager("connection reset by peer")
    assert len(rollouts.collect()[0]) == 5
    with pytest.raises(RayActorError):
        ray.get(out_of_reach.progress.remote(), timeout=PATIENCE_S)
    wait_until(lambda: not any(map(kept, engine_pool.handles)), "the engines to release what was collected")


def test_finished_responses_are_not_sampled_again(rollouts: RolloutsClient, caplog: pytest.LogCaptureFixture) -> None:
    """Two rollouts under way, of which the first is finished; those of a checkpoint's file, for another client or the
    same. Bytes that are no such file are let pass with a warning."""
    rollouts.allow_restarts(lambda: None)
    assert rollouts.finished_responses() == b""
    rollouts.roll_out(PROMPTS, 4, SAMPLING, seed=21)
    rollouts.wait_decoded()
    rollouts.roll_out(PROMPTS, 2, Sampling(1.0, 1.0, 100), seed=22)
    kept_responses = rollouts.finished_responses()
    finished = unpack(kept_responses)
    assert len(finished) >= 20
    before = [rollouts.collect()[0] for _ in range(2)]
    began_s = time.time()
    rollouts.restore_responses(b"of another version")
    rollouts.restore_responses(kept_responses, version=99)  # of which there is none
    rollouts.trained()
    assert rollouts.finished_responses() == b""
    rollouts.restore_responses(kept_responses, version=finished[0].versions[0].version)
    rollouts.roll_out(PROMPTS, 4, SAMPLING, seed=21)
    rollouts.roll_out(PROMPTS, 2, Sampling(1.0, 1.0, 100), seed=22)
    again = []
    for _ in range(2):
        groups, report = rollouts.collect()
        again.append(groups)
        assert 0 <= report.verify_tail_s < time.time() - began_s
    found = {c.seed: c for groups in again for group in groups for c in group.completions}
    assert len(found) == 30
    for completion in finished:
        np.testing.assert_array_equal(found.pop(completion.seed).log_probs, completion.log_probs)
    assert all(completion.started_s >= began_s for completion in found.values())
    assert [[g.prompt.problem.id for g in groups] for groups in again] == [
        [g.prompt.problem.id for g in groups] for groups in before
    ]
    assert "cannot be read and are sampled again" in caplog.text


def sampled(
    rollouts: RolloutsClient, asked: list[Prompt], seed: int, sampling: Sampling = SAMPLING
) -> list[Completion]:
    """Return two responses to each prompt, in the order of the prompts."""
    ticket = rollouts.roll_out(asked, 2, sampling, seed)
    return [made for group in rollouts.collect(ticket)[0] for made in group.completions]


def checkpoint(rollouts: RolloutsClient, seed: int) -> tuple[bytes, dict[int, float]]:
    """Sample PROMPTS, and return what a checkpoint before the update has: responses, and when they ended, by seed."""
    made = sampled(rollouts, PROMPTS, seed)
    saved = rollouts.finished_responses()
    rollouts.trained()
    assert rollouts.finished_responses() == b""
    return saved, {completion.seed: completion.finished_s for completion in made}


def times(responses: bytes) -> dict[int, float]:
    return {made.seed: made.finished_s for made in unpack(responses)}


def test_responses_of_other_requests_are_not_reused(rollouts: RolloutsClient, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint's responses, and rollouts whose requests have their seeds: of other prompts, of other tokens for the
    same problem, of the same tokens for another problem, at another temperature, with another T. All is sampled anew,
    and so is what does not say of which request it is. The same requests get them. The digest that is compared:
    test_request_plan."""
    saved, finished = checkpoint(rollouts, 41)
    of_older_version = pack([replace(made, request_digest=b"") for made in unpack(saved)])
    for asked, sampling, kept in (
        ([*PROMPTS[1:], PROMPTS[0]], SAMPLING, saved),
        ([prompt([3, 5 + index, 27], name=f"problem{index}") for index in range(5)], SAMPLING, saved),
        ([prompt([2, 5 + index, 27], name=f"other{index}") for index in range(5)], SAMPLING, saved),
        (PROMPTS, Sampling(1.5, 1.0, 48), saved),
        (PROMPTS, Sampling(1.0, 1.0, 47), saved),
        (PROMPTS, SAMPLING, of_older_version),
    ):
        began_s = time.time()
        caplog.clear()
        rollouts.restore_responses(kept)
        made = sampled(rollouts, asked, 41, sampling)
        assert {each.seed for each in made} == finished.keys() and all(each.started_s >= began_s for each in made)
        assert [each.problem_id for each in made[::2]] == [each.problem.id for each in asked]
        rollouts.trained()
        assert "10 of 10 responses" in caplog.text and rollouts.finished_responses() == b""
    rollouts.restore_responses(saved)
    assert all(made.finished_s == finished[made.seed] for made in sampled(rollouts, PROMPTS, 41))


def test_an_evaluation_leaves_a_checkpoint_s_responses_to_the_next_step(rollouts: RolloutsClient) -> None:
    """It is made first after a resume. It takes none, though its requests are the same here; a checkpoint that is
    written meanwhile has those of the step, and none of the evaluation's. What no step asks is dropped after it."""
    saved, finished = checkpoint(rollouts, 51)
    rollouts.restore_responses(saved)
    began_s = time.time()
    ticket = rollouts.roll_out(PROMPTS, 2, SAMPLING, seed=51, urgent=True)
    rollouts.wait_decoded(ticket)
    assert times(rollouts.finished_responses()) == finished
    evaluated, _ = rollouts.collect(ticket)
    assert all(made.started_s >= began_s for group in evaluated for made in group.completions)
    step = rollouts.roll_out(PROMPTS[:4], 2, SAMPLING, seed=51)
    ticket = rollouts.roll_out(PROMPTS[4:], 2, SAMPLING, seed=52, urgent=True)
    rollouts.wait_decoded(ticket)
    assert times(rollouts.finished_responses()) == finished
    rollouts.collect(ticket)
    groups, _ = rollouts.collect(step)
    assert all(made.finished_s == finished[made.seed] for group in groups for made in group.completions)
    assert len(unpack(rollouts.finished_responses())) == 10  # the step's, and two that may yet be asked
    rollouts.trained()
    assert rollouts.finished_responses() == b""


def test_a_checkpoint_s_responses_wait_for_a_step_that_is_asked_late(rollouts: RolloutsClient) -> None:
    """With refill and staleness a resumed run asks for the second step once the first is collected: only then is known
    which prompts are left for it."""
    asked = {61: PROMPTS[:2], 62: PROMPTS[2:]}
    finished = {made.seed: made.finished_s for seed, some in asked.items() for made in sampled(rollouts, some, seed)}
    saved = rollouts.finished_responses()
    rollouts.trained()
    rollouts.restore_responses(saved)
    for seed, some in asked.items():
        assert all(made.finished_s == finished[made.seed] for made in sampled(rollouts, some, seed))
    rollouts.trained()
    assert rollouts.finished_responses() == b""


def test_deadline_names_what_is_missing(engine_pool: EnginePool) -> None:
    config = rollout_config(step_timeout_s=0.02)
    client = RolloutsClient(engine_pool, config, VerifyConfig(workers=1), frozenset({"math"}), f"{RUN_ID}-hasty")
    client.roll_out(PROMPTS, 8, Sampling(1.0, 1.0, 100), seed=3)
    with pytest.raises(
        RolloutError, match=r"step_timeout_s = 0.02 s, \d+ of 40 .*problem\d sample \d+ \(on engine \d\)"
    ):
        client.collect()
    client.close()
    for handle in engine_pool.handles:  # other tests use these engines
        while ray.get(handle.call.remote("__getattribute__", "pending"), timeout=PATIENCE_S):
            ray.get(handle.harvest.remote(0.5), timeout=PATIENCE_S)
        ray.get(handle.harvest.remote(0.1), timeout=PATIENCE_S)


@pytest.mark.slow
def test_an_engine_that_no_longer_answers_is_killed(tiny_model: TinyModel, ray_cluster: None) -> None:
    """It is stopped, which looks like an answer that the network has lost: its process lives, and Ray sees nothing. One
    loss more than max_engine_restarts ends the run."""
    run_id = f"{RUN_ID}-silent"
    config = rollout_config(engines=1, max_engine_restarts=0)
    pool = EnginePool(config, tiny_model.folder, "float32", MAX_MODEL_TOKENS, run_id, on_cpu=True)
    verify = VerifyConfig(workers=1)
    client = RolloutsClient(pool, config, verify, frozenset({"math"}), run_id, answer_s=25.0)
    pool.wait_ready()
    client.roll_out(PROMPTS, 1, SAMPLING, seed=2)
    assert len(client.collect()[0]) == 5
    engine = psutil.Process(next(beat.pid for beat in read_beats(beats_folder(run_id)) if beat.who == "engine 0"))
    engine.suspend()
    try:
        client.roll_out(PROMPTS, 1, SAMPLING, seed=3)
        with pytest.raises(RolloutError, match=r"engine 0 died .*: it gave no answer for 25 s, and was killed"):
            client.collect()
    finally:
        engine.kill()
    with pytest.raises(EngineError, match=r"engine 0 is lost after 0 restarts \(rollout.max_engine_restarts = 0\)"):
        pool.restart_lost_engines()
    client.close()
    pool.close()


def test_an_engine_that_is_given_up_is_dead_for_the_pool_too(ray_cluster: None) -> None:
    """Ray cannot reach the first's process for a moment; the second has said itself that it failed, and keeps its
    reason. Not proven here: that Ray reports a broken connection so."""

    class Lives:  # in here, so that Ray's workers need not import this file
        """Stands for an engine's process: it answers."""

        def failure(self) -> None:
            return None

    engines = [ray.remote(Lives).options(num_cpus=0).remote() for _ in range(2)]
    ray.get([engine.failure.remote() for engine in engines], timeout=PATIENCE_S)  # they have started
    assert find_lost_engines(engines) == {}
    manager = RolloutManager(engines, 1, VerifyConfig(workers=1), frozenset({"math"}), 60.0)
    manager._call_failed(0, engines[0], ActorUnavailableError("connection reset", None))
    manager._call_failed(1, engines[1], RayTaskError("harvest", "", EngineFailed("out of memory")))
    while not (lost := find_lost_engines(engines)):  # a killed process may answer once more before it ends
        pass
    assert list(lost) == [0] and list(asyncio.run(manager.lost_engines())) == [0, 1]
    ray.kill(engines[1], no_restart=True)


def test_engine_that_cannot_start_says_why(tmp_path: Any, ray_cluster: None) -> None:
    pool = EnginePool(rollout_config(engines=1), tmp_path, "float32", 64, f"{RUN_ID}-none", on_cpu=True)
    with pytest.raises(
        EngineError, match=rf"(?s)engine 0 did not start.*{re.escape(str(tmp_path))} is not an HF model"
    ):
        pool.wait_ready()
    pool.close()
