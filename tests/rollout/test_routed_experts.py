"""The experts that an engine returns against those that transformers' routers choose for the same tokens, in fp32.

Not tried: GPUs, where the same tensors are written within CUDA graphs; tensor parallelism.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixtures import END, MAX_MODEL_TOKENS, RUN_ID, WORDS, TinyModel, decode, requests, rollout_config
from rigs import in_engine

from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.rollout.request_plan import request_digest
from or1_megatron.types import Completion, Request, Sampling

SPARSE, CHOSEN = (0, 2, 3), 2
PLAIN, ASKED = (Sampling(1.0, 1.0, 30, routed_experts=asked) for asked in (False, True))


@pytest.fixture(scope="module")
def mixture(tiny_model: TinyModel, tiny: Callable[..., Path], ray_cluster: None) -> Iterator[tuple[Any, Any]]:
    """An engine of a mixture of experts, whose second layer is dense, and transformers' model of it."""
    from transformers import AutoModelForCausalLM

    folder = tiny("qwen3_moe", vocab_size=len(WORDS), head_dim=32, pad_token_id=0, eos_token_id=END, bos_token_id=None)
    for file in tiny_model.folder.glob("*token*"):
        shutil.copy(file, folder)
    config = rollout_config(engines=1, router_replay=True, engine_args={"max_num_batched_tokens": 64})
    pool = EnginePool(config, folder, "float32", MAX_MODEL_TOKENS, f"{RUN_ID}-mixture", on_cpu=True)
    pool.wait_ready()
    yield pool.handles[0], AutoModelForCausalLM.from_pretrained(folder).eval()
    pool.close()


def assert_chosen(oracle: Any, completions: list[Completion], sent: list[Request]) -> None:
    found: list[Any] = []
    for layer in SPARSE:
        oracle.model.layers[layer].mlp.gate.register_forward_hook(lambda gate, given, out: found.append(out[2]))
    for completion, request in zip(completions, sent, strict=True):
        ids = [*request.prompt.token_ids.tolist(), *completion.token_ids.tolist()]
        experts = completion.routed_experts
        assert experts is not None and experts.dtype == np.uint8
        assert experts.shape == (len(ids) - 1, len(SPARSE), CHOSEN)
        with torch.no_grad():
            oracle(torch.tensor([ids]))
        expected = torch.stack(found[-len(SPARSE) :], dim=1).numpy()[:-1]
        assert (np.sort(experts, axis=2) == np.sort(expected, axis=2)).all()


def test_experts_are_those_that_transformers_chooses(mixture: tuple[Any, Any]) -> None:
    """Prompts of up to 90 tokens, of which steps of 64 read a part; each is asked six times, and shares its prefix."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, len(WORDS), size).tolist() for size in (3, 40, 90)]
    sent = requests(ASKED, seed=40, prompts=prompts, each=6)
    completions = decode(mixture[0], sent)
    assert_chosen(mixture[1], completions, sent)
    assert len({completion.token_ids.size for completion in completions}) > 3


def test_experts_of_requests_that_are_read_anew(mixture: tuple[Any, Any]) -> None:
    """After nine tokens all requests are preempted and the prefix cache is dropped, as by a handoff."""
    sent = requests(ASKED, seed=900, each=6)

    def disturbed(engine: Any) -> list[Completion]:
        engine.submit(sent)
        found = [completion for _ in range(9) for completion in engine.step()]
        assert engine._engine.reset_prefix_cache(reset_running_requests=True)
        while engine.pending:
            found += engine.step()
        return found

    found = {completion.seed: completion for completion in in_engine(mixture[0], disturbed)}
    assert_chosen(mixture[1], [found[request.seed] for request in sent], sent)


def test_experts_come_only_where_they_are_asked(mixture: tuple[Any, Any], engine_pool: EnginePool) -> None:
    """An evaluation does not ask; what was sampled without experts is sampled anew. A dense model has none."""
    assert all(completion.routed_experts is None for completion in decode(mixture[0], requests(PLAIN)))
    assert request_digest(requests(PLAIN)[0]) != request_digest(requests(ASKED)[0])

    def route(engine: Any) -> None:
        def keep(worker: Any) -> None:
            from or1_megatron.rollout.routed_experts import RoutingCache

            RoutingCache(worker.model_runner)

        engine._llm.collective_rpc(keep)

    with pytest.raises(ValueError, match=r"router_replay = true, but this engine cannot return the experts"):
        in_engine(engine_pool.handles[0], route)
