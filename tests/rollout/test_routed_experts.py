"""The experts that an engine returns against those that transformers' routers choose for the same tokens, in fp32.

Requests share prefixes, prompts are read in chunks, requests are preempted, and texts are read anew after a reset of
the prefix cache, as after a handoff. Not tried: GPUs, where the same tensors are written within CUDA graphs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fixtures import END, MAX_MODEL_TOKENS, RUN_ID, WORDS, TinyModel, decode, requests, rollout_config
from ray.exceptions import RayTaskError
from rigs import in_engine

from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.rollout.request_plan import request_digest
from or1_megatron.types import Completion, Request, Sampling

EXPERTS, CHOSEN, SPARSE = 8, 2, (0, 2)
ASKED = Sampling(1.0, 1.0, 30, routed_experts=True)


@pytest.fixture(scope="module")
def mixture(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a tiny mixture of experts, whose middle layer is dense, and transformers' model of it."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    for file in tiny_model.folder.glob("*token*"):
        shutil.copy(file, folder)
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=None,
        initializer_range=0.15,
    )
    oracle = Qwen3MoeForCausalLM(config).eval()
    oracle.save_pretrained(folder)
    return folder, oracle


@pytest.fixture(scope="module")
def engine(mixture: tuple[Path, Any], ray_cluster: None) -> Iterator[Any]:
    config = rollout_config(engines=1, router_replay=True, engine_args={"max_num_batched_tokens": 64})
    pool = EnginePool(config, mixture[0], "float32", MAX_MODEL_TOKENS, f"{RUN_ID}-moe", on_cpu=True)
    pool.wait_ready()
    yield pool.handles[0]
    pool.close()


def chosen_by(oracle: Any, ids: list[int]) -> np.ndarray:
    """Return the experts [tokens, layers, k] that transformers' routers choose, in ascending order."""
    import torch

    found = []
    hooks = [
        oracle.model.layers[layer].mlp.gate.register_forward_hook(lambda gate, given, out: found.append(out[2]))
        for layer in SPARSE
    ]
    with torch.no_grad():
        oracle(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(found, dim=1).numpy(), axis=2)


def assert_chosen(oracle: Any, completions: list[Completion], sent: list[Request]) -> None:
    for completion, request in zip(completions, sent, strict=True):
        ids = [*request.prompt.token_ids.tolist(), *completion.token_ids.tolist()]
        experts = completion.routed_experts
        assert experts is not None and experts.dtype == np.uint8
        assert experts.shape == (len(ids) - 1, len(SPARSE), CHOSEN)
        assert (np.sort(experts, axis=2) == chosen_by(oracle, ids)[:-1]).all()


def test_experts_are_those_that_transformers_chooses(mixture: tuple[Path, Any], engine: Any) -> None:
    """Prompts of up to 90 tokens, of which steps of 64 read a part; each is asked six times, and shares its prefix."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, len(WORDS), size).tolist() for size in (3, 40, 90)]
    sent = requests(ASKED, seed=40, prompts=prompts, each=6)
    completions = decode(engine, sent)
    assert_chosen(mixture[1], completions, sent)
    assert len({completion.token_ids.size for completion in completions}) > 3
    assert len(np.unique(np.concatenate([c.routed_experts.ravel() for c in completions]))) == EXPERTS  # type: ignore[union-attr]


def test_experts_of_requests_that_were_preempted_and_read_anew(mixture: tuple[Path, Any], engine: Any) -> None:
    sent = requests(ASKED, seed=900, each=6)

    def disturbed(engine: Any) -> list[Completion]:
        engine.submit(sent)
        found = [completion for _ in range(9) for completion in engine.step()]
        assert engine._engine.reset_prefix_cache(reset_running_requests=True)
        while engine.pending:
            found += engine.step()
        return found

    found = {completion.seed: completion for completion in in_engine(engine, disturbed)}
    assert_chosen(mixture[1], [found[request.seed] for request in sent], sent)


def test_experts_come_only_where_they_are_asked(mixture: tuple[Path, Any], engine: Any, engine_pool: Any) -> None:
    """An evaluation does not ask. An engine that keeps none refuses, by the setting that makes it keep them."""
    assert all(c.routed_experts is None for c in decode(engine, requests(Sampling(1.0, 1.0, 8))))
    with pytest.raises(RayTaskError, match=r"sample 0 of problem 0 asks for the experts .* rollout.router_replay=true"):
        decode(engine_pool.handles[0], requests(ASKED))
    plain, asked = (requests(Sampling(1.0, 1.0, 8, kept))[0] for kept in (False, True))
    assert request_digest(plain) != request_digest(asked)  # what was sampled without is sampled anew
