"""``or1 doctor mismatch`` on a real engine, a real policy and transformers: faults injected one by one are each named.

Not proven here: sleep and wake (vLLM's CPU engines cannot sleep; the rotary table is zeroed instead), several devices.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from engine_fixtures import RUN_ID, TinyModel, rollout_config
from rigs import fault, perturbed, stale_prefix_cache
from safetensors.torch import load_file
from tiny_models import make_tiny

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.parallel.mesh import Mesh, stop_process_group
from or1_megatron.parallel.network import build_network
from or1_megatron.parallel.packed import PackedRotary
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.selftest.mismatch.causes import verdict
from or1_megatron.selftest.mismatch.measure import Comparison, Inputs
from or1_megatron.selftest.models import add_tokenizer, one_rank
from or1_megatron.types import Sampling
from or1_verify.types import Message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DOWN = "model.layers.1.mlp.down_proj"
HEAD = 32


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with patch.dict(os.environ):  # later tests of this process start ranks of their own
        yield one_rank()
        stop_process_group()


@contextmanager
def comparison_of(family: str, dtype: Any, folder: Path, mesh: Mesh) -> Iterator[Comparison]:
    """An engine that starts with version 10 of a random model, and a policy with version 11."""
    folders = {10: folder / "v10", 11: folder / "v11"}
    for each in folders.values():
        each.mkdir(parents=True)
    perturbed(make_tiny(folders[10], family, dtype=dtype, head_dim=HEAD), 3).save_pretrained(folders[11])
    for each in folders.values():
        add_tokenizer(each)
    prompts = [np.random.default_rng(n).integers(2, 61, n, dtype=np.int32) for n in (5, 9, 17, 40)]
    inputs = Inputs(folders, dtype, prompts, Sampling(0.7, 0.8, 64))
    pool = EnginePool(rollout_config(engines=1), folders[10], dtype, 128, f"{RUN_ID}-{family}-{dtype}", on_cpu=True)
    pool.wait_ready()
    comparison = Comparison(inputs, pool.handles[0], mesh, ParallelConfig(layers="own"))
    comparison.hand_off()
    yield comparison
    pool.close()


@pytest.fixture(scope="module")
def comparison(ray_cluster: None, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparison]:
    with comparison_of("qwen3", "float32", tmp_path_factory.mktemp("qwen3"), mesh) as made:
        yield made


def in_engine(path: str, name: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Replace an attribute of an object in the engine, found from vLLM's model runner, by value(attribute)."""

    def bring(engine: Any) -> None:
        owner = engine._engine.model_executor.driver_worker.worker.model_runner
        for part in path.split("."):
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        true = getattr(owner, name)
        setattr(owner, name, value(true))
        engine.undo = lambda: setattr(owner, name, true)

    return bring


def in_linear(name: str, apply: Callable[[Any], Callable[[Any], Any]]) -> Callable[[Any], None]:
    """Replace y = f(x) of a packed linear of the engine by y = apply(f)(x)."""
    return in_engine(f"model.{name}", "cpu_linear", lambda f: lambda x, w, _: apply(lambda v: f(v, w, None))(x))


def in_sampler(temperature: float, top_p: float = 1.0, noise: float = 0.0) -> Callable[[Any], None]:
    """Report other log-probs of sampled tokens; ``noise`` only where several requests are decoded together."""

    def of(true: Any) -> Any:
        def draw(logits: Any, *given: Any) -> Any:
            out = true(logits, *given)
            noisy = logits + noise * torch.randn(logits.shape) * (len(logits) > 1)
            values = (noisy.float() / temperature).log_softmax(-1)
            ranked = values.exp().sort(descending=True).values
            kept = (ranked * (ranked.cumsum(-1) - ranked < top_p)).sum(-1)
            out.logprobs_tensors.logprobs[:, 1] = values.gather(1, out.sampled_token_ids.long())[:, 0] - kept.log()
            return out

        return draw

    return in_engine("sampler", "draw", of)


def faults(folders: dict[int, Path]) -> dict[str, tuple[Callable[[Any], None], str]]:
    """Faults in the engine, each with a part of its verdict. All is nested: the engine's process gets it by value."""
    stale = load_file(folders[10] / "model.safetensors")[f"{DOWN}.weight"]

    def swapped(true: Any) -> Any:
        return lambda x: true(torch.cat((x[:, HEAD : 2 * HEAD], x[:, :HEAD], x[:, 2 * HEAD :]), dim=1))

    def rebased(table: Any) -> Any:
        angles = torch.arange(len(table))[:, None] * 700 ** -(torch.arange(HEAD // 2) / (HEAD // 2))
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def damaged(engine: Any) -> None:
        true, caches = engine._score_last, engine._engine.model_executor.driver_worker.worker.model_runner.kv_caches

        def score_last(tokens: Any) -> float:
            for cache in caches:
                cache.mul_(1.5)
            return float(true(tokens))

        engine._score_last = score_last
        engine.undo = lambda: (delattr(engine, "_score_last"), engine._engine.reset_prefix_cache())

    def rounded(true: Any) -> Any:
        return lambda *given, **named: true(*given, **named).bfloat16().float()

    def ones(true: Any) -> Any:
        return torch.nn.Parameter(torch.ones_like(true), requires_grad=False)

    norm, rotary = "model.layers.0.post_attention_layernorm", "model.model.layers.0.self_attn.rotary_emb"
    attention, logits = "model.model.layers.1.self_attn.attn.impl", "model.logits_processor"
    said = "in the log-probs of engine, as it samples"
    return {
        "stale layer": (in_linear(DOWN, lambda true: lambda x: x @ stale.t()), f"{DOWN}.weight is of version 10"),
        "scaled layer": (in_linear(DOWN, lambda true: lambda x: 1.1 * true(x)), f"{DOWN}.weight is 1.1 times"),
        "swapped heads": (in_linear("model.layers.2.self_attn.o_proj", swapped), "o_proj.weight has its heads 0, 1 in"),
        "dropped norm": (in_engine(f"model.{norm}", "weight", ones), f"{norm}.weight is 1 everywhere"),
        "rotary base": (in_engine(rotary, "cos_sin_cache", rebased), "rotation is as with a base of 700, not 500"),
        "rotary zeroed": (in_engine(rotary, "cos_sin_cache", torch.zeros_like), "rotation is all zero"),
        "bf16 head": (in_linear("lm_head", rounded), "weights: the engine's lm_head.weight is rounded to bfloat16"),
        "bf16 logits": (in_engine(logits, "forward", rounded), "head: the engine's logits are rounded to bfloat16"),
        "scaled logits": (in_engine(logits, "scale", lambda true: 0.5), "head: the engine's logits are 0.5 times"),
        "attention": (in_engine(attention, "scale", lambda true: 1.5 * true), "model.layers.1.self_attn.o_proj diff"),
        "damaged cache": (damaged, "KV cache: the engine is"),
        "no temperature": (in_sampler(1.0), f"temperature is not applied {said}"),
        "temperature twice": (in_sampler(0.49), f"temperature is applied twice {said}"),
        "top-p": (in_sampler(0.7, 0.8), f"top-p is applied {said}"),
        "batch": (in_sampler(0.7, noise=0.3), "batch: the engine is"),
    }


def found(comparison: Comparison, **changes: Any) -> list[str]:
    """Return the verdict on a copy of the comparison with changed attributes."""
    comparison = copy.copy(comparison)
    vars(comparison).update(changes)
    comparison.examine()
    return verdict(comparison)


def test_each_fault_of_the_engine_is_named_and_none_in_a_healthy_run(comparison: Comparison) -> None:
    assert [each.startswith("noise of float32: ") for each in found(comparison)] == [True]
    expected, said = faults(comparison.inputs.folders), {}
    for name, (bring, _) in expected.items():
        with fault(comparison.handle, bring):
            said[name] = found(comparison)
    wrong = {name: each for name, each in said.items() if len(each) != 1 or expected[name][1] not in each[0]}
    assert wrong == {} and found(comparison)[0].startswith("noise")


def test_a_prefix_cache_that_outlives_a_handoff_is_named(comparison: Comparison) -> None:
    old = Comparison(
        replace(comparison.inputs, folders={10: comparison.inputs.folders[10]}),
        comparison.handle,
        comparison.mesh,
        comparison.parallel,
    )
    comparison.sender.close()
    old.hand_off()
    old.sender.close()
    with stale_prefix_cache(comparison.handle):
        comparison.hand_off()
        (said,) = found(comparison)
    comparison.hand_off()
    assert said.startswith("KV cache: ")


def test_each_fault_of_the_policy_is_named(comparison: Comparison) -> None:
    def built(version: int, dtype: Any) -> Any:
        return build_network(
            ModelConfig(hf=comparison.inputs.folders[version], dtype=dtype), comparison.parallel, comparison.mesh
        )

    rotated, unheated = built(11, "float32"), copy.copy(comparison)
    (rotary,) = (module for module in rotated.chunks[0].modules() if isinstance(module, PackedRotary))
    rotary.inverse_frequency.mul_((500 / 900) ** (torch.arange(HEAD // 2) / (HEAD // 2)))
    unheated.inputs = replace(comparison.inputs, sampling=replace(comparison.inputs.sampling, temperature=1.0))
    for expected, changes in {
        "dtype: the policy computes in torch.bfloat16": {"network": built(11, "bfloat16")},
        "weights: the policy's model.embed_tokens.weight is of version 10": {"network": built(10, "float32")},
        "positions: the policy's rotation is as with a base of 900": {"network": rotated},
        "sampling: temperature is not applied in the log-probs of policy": {"by_policy": unheated.by_policy},
    }.items():
        (said,) = found(comparison, **changes)
        assert said.startswith(expected)


def test_other_prompt_tokens_and_recorded_log_probs_are_named(
    comparison: Comparison, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The tokens are a real tokenizer's: with another chat template, and with a second BOS."""
    folder, tokens = Path(shutil.copytree(tiny_model.folder, tmp_path / "model")), []
    for begin in ("<user>", ""):
        (folder / "chat_template.jinja").write_text(begin + "{% for m in messages %}{{ m.content }}{% endfor %}so ")
        tokens.append(ChatTemplate(load_tokenizer(folder)).token_ids([Message("user", "7+8=")]))
    recorded = [(prompt, made, log_probs + 0.1) for prompt, made, log_probs in comparison.sample(together=True)]
    one, two = found(comparison, inputs=replace(comparison.inputs, recorded=recorded, retokenised=[("p1", *tokens)]))
    assert one.startswith("prompts: that of problem p1 has 6 tokens in the run, and 5 others") and two.startswith(
        "unknown: the run's engines, as rec"
    )
    doubled = replace(comparison.inputs, prompts=[np.array([3, 3, 9, 8], np.int32)], bos=3)
    assert found(comparison, inputs=doubled)[0].startswith("prompts: one begins with two BOS (token 3)")


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "bfloat16"), ("qwen3_moe", "float32")])
def test_healthy_in_bf16_and_a_mixture_with_another_router(
    ray_cluster: None, mesh: Mesh, family: str, dtype: str, tmp_path: Path
) -> None:
    with comparison_of(family, dtype, tmp_path, mesh) as comparison:
        assert [each.startswith(f"noise of {dtype}: ") for each in found(comparison)] == [True]
        if family == "qwen3_moe":
            gate = torch.randn(4, 64)
            with fault(comparison.handle, in_linear("model.layers.0.mlp.gate", lambda true: lambda x: x @ gate.t())):
                (said,) = found(comparison)
            assert said.startswith("router: the engine's model.layers.0.mlp.gate.weight differs by")
