"""An engine's process is killed at several points of a handoff: nobody serves a mixture, and its successor serves the
current weights or nothing. Real processes. Not tried: the death of a node, of one worker of a tensor-parallel
engine.

That a run goes on by itself after such deaths is shown in tests/train.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from engine_fixtures import MAX_MODEL_TOKENS, RUN_ID, WORDS, TinyModel, decode, prompt, rollout_config
from rigs import TRANSPORTS, TamperedTrainer, in_engine, perturbed, scores
from waiting import PATIENCE_S

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.rollout.client import start_rollouts
from or1_megatron.rollout.engine_group import EngineError
from or1_megatron.rollout.pool import EnginePool
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Request, Sampling
from or1_verify.config import VerifyConfig

PROBE = probe_tokens(len(WORDS), 48)
TIMEOUT_S = 240.0


@pytest.fixture(params=["gloo", "shard"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pool(tiny_model: TinyModel, ray_cluster: None, transport: str) -> Iterator[EnginePool]:
    pool = EnginePool(
        rollout_config(max_engine_restarts=1),
        tiny_model.folder,
        "float32",
        MAX_MODEL_TOKENS,
        f"{RUN_ID}-death-{transport}",
        on_cpu=True,
        weight_transfer=TRANSPORTS[transport]["backend"],
    )
    pool.wait_ready()
    yield pool
    pool.close()


def kill(pool: EnginePool, index: int, how: int = signal.SIGKILL) -> None:
    os.kill(in_engine(pool.handles[index], lambda engine: os.getpid()), how)


def pending(handle: Any) -> int:
    """How many requests the engine has."""
    found: int = ray.get(handle.call.remote("__getattribute__", "pending"), timeout=PATIENCE_S)
    return found


def serves(handle: Any, version: int, seed: int) -> bool:
    """Whether a request is answered, with this version."""
    sent = [Request(prompt([2, 7, 9]), 0, Sampling(1.0, 1.0, 8), seed)]
    return [span.version for span in decode(handle, sent)[0].versions] == [version]


def silent(handle: Any, seed: int) -> bool:
    """Whether a request is taken, and not answered."""
    sent = [Request(prompt([2, 7, 9]), 0, Sampling(1.0, 1.0, 8), seed)]
    ray.get(handle.submit.remote(pack(sent)), timeout=PATIENCE_S)
    return unpack(ray.get(handle.harvest.remote(0.5), timeout=PATIENCE_S)).completions == ()


@pytest.mark.slow
def test_engine_killed_while_it_receives(tiny_model: TinyModel, pool: EnginePool, transport: str) -> None:
    """Its successor has new weights before it serves; a second death is one too many."""
    config = HandoffConfig(bucket_bytes=40_000, timeout_s=TIMEOUT_S, **TRANSPORTS[transport])
    control = pool.control(TIMEOUT_S)
    old, new = perturbed(tiny_model.oracle, 1), perturbed(tiny_model.oracle, 2)
    trainer = TamperedTrainer(old, config, control)
    trainer.send(old, 1)
    control.certify(1)
    assert all(serves(handle, 1, seed) for seed, handle in enumerate(pool.handles))
    messages = 0

    def deadly(buffer: Any) -> None:
        nonlocal messages
        messages += 1
        if messages == 3:
            # by its pid, since its thread is receiving
            os.kill(pid, signal.SIGKILL)
            psutil.Process(pid).wait(60)

    pid = in_engine(pool.handles[1], lambda engine: os.getpid())
    with trainer.tampering(deadly), pytest.raises(RuntimeError, match=r"engine 1 .*died|engine rank 1") as failure:
        trainer.send(new, 2)
    assert "timeout_s" not in str(failure.value)  # nobody waited for the deadline
    with pytest.raises(EngineError, match=r"it holds a mixture|engine 1 .*died"):
        control.certify(2)
    assert silent(pool.handles[0], seed=10)
    assert pool.restart_lost() == [1]
    assert pool.restart_lost() == []
    assert silent(pool.handles[1], seed=11)  # it holds the folder's weights
    trainer.close()
    trainer.send(new, 2)
    compare_probe(control.score_prompts(PROBE), scores(new, PROBE), bound=1e-4)
    control.certify(2)
    assert control.versions() == [2, 2]
    for handle in pool.handles:  # the requests that had waited come first
        while pending(handle):
            unpack(ray.get(handle.harvest.remote(0.5), timeout=PATIENCE_S))
    assert all(serves(handle, 2, 20 + seed) for seed, handle in enumerate(pool.handles))
    kill(pool, 1)
    with pytest.raises(EngineError, match=r"engine 1 is lost after 1 restarts \(rollout.max_engine_restarts = 1\)"):
        pool.restart_lost()
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo"])
@pytest.mark.parametrize("in_turns", [False, True])
def test_engine_killed_while_it_decodes(
    tiny_model: TinyModel, pool: EnginePool, transport: str, in_turns: bool
) -> None:
    """The rollout comes to its end with the samples of an undisturbed one: same requests, same seeds, same weights.
    Where engines take turns with a trainer, none decodes anything while one is replaced.

    That the very same tokens come out holds for this batch; vLLM promises no more than equal random numbers.
    """
    control = pool.control(TIMEOUT_S)
    weights = perturbed(tiny_model.oracle, 1)
    trainer = TamperedTrainer(weights, HandoffConfig(timeout_s=TIMEOUT_S), control)
    trainer.send(weights, 1)
    control.certify(1)
    client = start_rollouts(pool, rollout_config(), VerifyConfig(workers=1), frozenset({"math"}), f"{RUN_ID}-revived")
    prompts = [prompt([2, 5 + index, 27], name=f"problem{index}", answer='["1"]') for index in range(5)]

    def revive() -> None:
        pool.restart_lost()
        if in_turns:
            assert [pending(handle) for handle in pool.handles] == [0, 0]
        trainer.close()
        trainer.send(weights, 1)
        compare_probe(control.score_prompts(PROBE), scores(weights, PROBE), bound=1e-4)
        control.certify(1)
        client.rejoin(pool.handles)

    client.revive_with(revive, in_turns=in_turns)
    tokens = []
    for deadly in (False, True):
        client.roll_out(prompts, 40, Sampling(1.0, 1.0, 100), seed=7)
        if deadly:
            kill(pool, 0)
        groups, _ = client.collect()
        tokens.append([c.token_ids.tolist() for group in groups for c in group.completions])
        assert {span.version for group in groups for c in group.completions for span in c.versions} == {1}
    assert tokens[0] == tokens[1]
    # again, while nobody waits for a rollout; and then the next one brings it back
    kill(pool, 1)
    client.roll_out(prompts, 4, Sampling(1.0, 1.0, 20), seed=8)
    groups, _ = client.collect()
    assert sum(len(group.completions) for group in groups) == 20
    client.close()
    trainer.close()
