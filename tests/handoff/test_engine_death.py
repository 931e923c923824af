"""An engine's process is killed in a handoff: nobody serves a mixture, and its successor serves the current weights or
nothing. Real processes. Not tried: the death of a node, of one worker of a tensor-parallel engine.

That a run goes on by itself after deaths in handoffs and while engines decode is shown in tests/train.
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
from rigs import TamperedTrainer, in_engine, perturbed, scores
from waiting import PATIENCE_S

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.rollout.engine_group import EngineError
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Request, Sampling

PROBE = probe_tokens(len(WORDS), 48)
TIMEOUT_S = 240.0


@pytest.fixture
def pool(tiny_model: TinyModel, ray_cluster: None) -> Iterator[EnginePool]:
    pool = EnginePool(
        rollout_config(max_engine_restarts=1),
        tiny_model.folder,
        "float32",
        MAX_MODEL_TOKENS,
        f"{RUN_ID}-death",
        on_cpu=True,
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
def test_engine_killed_while_it_receives(tiny_model: TinyModel, pool: EnginePool) -> None:
    """Its successor has new weights before it serves; a second death is one too many."""
    config = HandoffConfig(bucket_bytes=40_000, timeout_s=TIMEOUT_S, transport="gloo")
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
    for handle in pool.handles:  # the requests that had waited come first
        while pending(handle):
            unpack(ray.get(handle.harvest.remote(0.5), timeout=PATIENCE_S))
    assert all(serves(handle, 2, 20 + seed) for seed, handle in enumerate(pool.handles))
    kill(pool, 1)
    with pytest.raises(EngineError, match=r"engine 1 is lost after 1 restarts \(rollout.max_engine_restarts = 1\)"):
        pool.restart_lost()
    trainer.close()
