"""A real vLLM engine on CPU, fp32, against transformers. CUDA options, tensor parallelism, sleep are not tried."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from engine_fixtures import END, MAX_MODEL_TOKENS, PROMPTS, WORDS, TinyModel, decode, requests
from ray.exceptions import RayTaskError
from rigs import in_engine

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.rollout.engine_group import EngineGroup, gather
from or1_megatron.rollout.engine_pool import EngineError, EnginePool, engine_env, start_deadline
from or1_megatron.types import Completion, Request, Sampling


def assert_log_probs(model: TinyModel, completions: list[Completion], sent: list[Request], temperature: float) -> None:
    for completion, request in zip(completions, sent, strict=True):
        ids = request.prompt.token_ids.tolist()
        expected = model.log_probs(ids, completion.token_ids.tolist(), temperature)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
        assert completion.entropy == pytest.approx(
            model.entropy(ids, completion.token_ids.tolist(), temperature), abs=1e-4
        )


def test_greedy_tokens_are_those_of_transformers(tiny_model: TinyModel, engine_pool: Any) -> None:
    import torch

    sent = requests(Sampling(0.0, 1.0, 24))
    for completion, ids in zip(decode(engine_pool.handles[0], sent), PROMPTS, strict=True):
        inputs = torch.tensor([ids])
        out = tiny_model.oracle.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, do_sample=False
        )
        assert completion.token_ids.tolist() == out[0, len(ids) :].tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_log_probs_have_temperature_applied_and_top_p_not(
    tiny_model: TinyModel, engine_pool: Any, temperature: float, top_p: float
) -> None:
    """That top_p does cut is asserted too: nothing outside the oracle's nucleus may be sampled."""
    sent = requests(Sampling(temperature, top_p, 32), each=8)
    completions = decode(engine_pool.handles[0], sent)
    assert_log_probs(tiny_model, completions, sent, temperature)
    if top_p < 1:
        import torch

        for completion, request in zip(completions, sent, strict=True):
            ids = request.prompt.token_ids.tolist()
            whole = torch.tensor([ids + completion.token_ids.tolist()])
            with torch.no_grad():
                logits = tiny_model.oracle(whole).logits[0].double() / temperature
            probs = torch.softmax(logits, dim=-1)[len(ids) - 1 : -1]
            for row, token in zip(probs, completion.token_ids.tolist(), strict=True):
                assert float(row[row > row[token]].sum()) < top_p + 1e-6


def test_mixed_sampling_in_one_batch_keeps_each_request_s_log_probs(tiny_model: TinyModel, engine_pool: Any) -> None:
    greedy, warm = requests(Sampling(0.0, 1.0, 16)), requests(Sampling(1.5, 0.9, 16), seed=50_000)
    completions = decode(engine_pool.handles[0], greedy + warm)
    assert_log_probs(tiny_model, completions[:3], greedy, 1.0)
    assert_log_probs(tiny_model, completions[3:], warm, 1.5)


def test_same_seed_same_tokens_on_any_engine_and_other_seed_other_tokens(engine_pool: Any) -> None:
    """Holds for this batch; vLLM promises no more than equal random numbers (see engine.py)."""
    sampling = Sampling(1.0, 1.0, 32)
    first = decode(engine_pool.handles[0], requests(sampling, seed=5, each=4))
    again = decode(engine_pool.handles[0], requests(sampling, seed=5, each=4))
    elsewhere = decode(engine_pool.handles[1], requests(sampling, seed=5, each=4))
    other = decode(engine_pool.handles[0], requests(sampling, seed=6_000_000, each=4))
    tokens = [[c.token_ids.tolist() for c in batch] for batch in (first, again, elsewhere, other)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[0] != tokens[3]
    assert len({tuple(ids) for ids in tokens[0][:4]}) > 1  # samples of one group differ


def test_a_response_is_the_same_however_it_came_about(engine_pool: Any) -> None:
    """Halfway all requests are preempted, some are given up and asked again, others join; and the other engine's.

    Entropies are those of the oracle's whole distributions in test_log_probs_have_temperature_applied_and_top_p_not.
    """
    sent = requests(Sampling(1.0, 1.0, 40), seed=700, each=6)
    others = requests(Sampling(1.0, 1.0, 20), seed=90_000, each=3)

    def disturbed(engine: Any) -> list[Completion]:
        engine.submit(sent)
        found = [completion for _ in range(9) for completion in engine.step()]
        assert engine._engine.reset_prefix_cache(reset_running_requests=True)
        found += engine.step()
        again = set(engine.abort([request.seed for request in sent[::3]]))
        engine.submit(others)
        engine.submit([request for request in sent if request.seed in again])
        while engine.pending:
            found += engine.step()
        return found

    found = {completion.seed: completion for completion in in_engine(engine_pool.handles[0], disturbed)}
    for plain in decode(engine_pool.handles[1], sent):
        assert found[plain.seed].token_ids.tolist() == plain.token_ids.tolist()
        assert found[plain.seed].entropy == pytest.approx(plain.entropy, abs=1e-5)


def test_a_seed_beyond_64_bits_and_logits_without_a_distribution_are_named(engine_pool: Any) -> None:
    sent = requests(Sampling(1.0, 1.0, 4))
    with pytest.raises(RayTaskError, match=rf"engine 0: sample 0 of problem 0 has the seed {1 << 64}; expected an int"):
        decode(engine_pool.handles[0], [replace(sent[0], seed=1 << 64)])

    def spoiled(engine: Any) -> str:
        sampler = engine._engine.model_executor.driver_worker.worker.model_runner.sampler
        draw = sampler.draw

        def without(logits: Any, *given: Any) -> Any:
            logits[1:] = float("nan")
            return draw(logits, *given)

        sampler.draw = without
        engine.submit(sent)
        try:
            while engine.pending:
                engine.step()
        except RuntimeError as error:
            return str(error)
        finally:
            sampler.draw = draw
            engine.abort_all()
        return "nothing was raised"

    said = in_engine(engine_pool.handles[0], spoiled)
    assert re.match(r"engine 0: sample 0 of problem 1 has no distribution at its token 0: the logits hold NaN", said)


def test_requests_that_are_given_up(engine_pool: Any) -> None:
    """After 21 iterations the engine says which requests it has given up: those of which no response has ended."""
    sent = requests(Sampling(1.0, 1.0, 60), seed=400, each=8)

    def give_up(engine: Any) -> tuple[list[Completion], list[int], int]:
        engine.submit(sent)
        finished = [completion for _ in range(21) for completion in engine.step()]
        return finished, engine.abort([request.seed for request in sent]), engine.pending

    finished, aborted, left = in_engine(engine_pool.handles[0], give_up)
    assert sorted([*(each.seed for each in finished), *aborted]) == sorted(request.seed for request in sent)
    assert finished and aborted and left == 0


def test_stop_and_length_and_what_the_text_holds(engine_pool: Any) -> None:
    """stop: ends with the end token, which the text lacks; length: exactly T tokens. Special tokens stay in it."""
    sent = requests(Sampling(1.0, 1.0, 40), seed=9, each=10)
    completions = decode(engine_pool.handles[1], sent)
    reasons = {completion.finish_reason for completion in completions}
    assert reasons == {"stop", "length"}
    seen = ""
    for completion in completions:
        ids = completion.token_ids.tolist()
        assert len(ids) == len(completion.log_probs)
        if completion.finish_reason == "stop":
            assert ids[-1] == END and END not in ids[:-1]
            ids = ids[:-1]
        else:
            assert len(ids) == 40 and END not in ids
            assert completion.truncated
        assert completion.text == "".join(WORDS[token] for token in ids)
        assert completion.engine == 1
        assert [span.first_token for span in completion.versions] == [0]
        assert 0 < completion.started_s <= completion.finished_s
        seen += completion.text
    assert "</think>" in seen and "<user>" in seen


def test_prompts_longer_than_one_prefill_batch_are_decoded(tiny_model: TinyModel, engine_pool: Any) -> None:
    """More requests than ``max_concurrent``, and prompts that fill the engine's context but for two tokens."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, len(WORDS), MAX_MODEL_TOKENS - 2).tolist() for _ in range(70)]
    sent = requests(Sampling(1.0, 1.0, 2), prompts=prompts)
    completions = decode(engine_pool.handles[0], sent)
    assert_log_probs(tiny_model, completions[::7], sent[::7], 1.0)


def test_request_that_exceeds_the_context_is_refused_by_name(engine_pool: Any) -> None:
    sent = requests(Sampling(1.0, 1.0, MAX_MODEL_TOKENS), prompts=[[2, 3]])
    with pytest.raises(RayTaskError, match=rf"problem 0 \(test.jsonl:0\).*{MAX_MODEL_TOKENS + 2}.*max_model_tokens"):
        decode(engine_pool.handles[0], sent)
    assert len(decode(engine_pool.handles[0], requests(Sampling(1.0, 1.0, 4)))) == 3  # and does no harm


def test_scores_of_prompts_equal_transformers(tiny_model: TinyModel, engine_pool: Any) -> None:
    sequences = [np.array(ids, dtype=np.int32) for ids in ([5, 9, 30, 1, 1, 0, 12], [7, 8])]
    scores = engine_pool.control(240.0).score_prompts(sequences)
    assert len(scores) == 2
    for engine in scores:
        for values, ids in zip(engine, sequences, strict=True):
            np.testing.assert_allclose(values, tiny_model.log_probs(ids[:1].tolist(), ids[1:].tolist()), atol=1e-4)


def test_engines_on_cpu_are_refused_without_a_size_for_their_cache(tiny_model: TinyModel) -> None:
    with pytest.raises(EngineError, match=r"kv_cache_bytes of the engines is not set; on CPU"):
        EnginePool(RolloutConfig(engines=1), tiny_model.folder, "float32", 64, "none", on_cpu=True)


def test_an_engine_runs_the_model_runner_that_cpu_has(engine_pool: Any) -> None:
    """With Triton, as on GPUs, vLLM would run its V2 runner, whose sampler is another (docs/decisions.md).

    Asks vLLM's own decision for the real engine's configuration; does not prove that the V1 runner runs on a GPU.
    """

    def runners(engine: Any) -> tuple[bool, bool, str]:
        import vllm.config.vllm as deciding
        from vllm import envs

        class Unset:
            def __getattr__(self, name: str) -> Any:
                return None if name == "VLLM_USE_V2_MODEL_RUNNER" else getattr(envs, name)

        config = engine._llm.llm_engine.vllm_config
        found, deciding.HAS_TRITON = deciding.HAS_TRITON, True
        try:
            ours = config.use_v2_model_runner
            deciding.envs = Unset()
            default = config.use_v2_model_runner
        finally:
            deciding.HAS_TRITON, deciding.envs = found, envs
        return ours, default, os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]

    assert in_engine(engine_pool.handles[0], runners) == (False, True, "8")


def test_an_engine_samples_by_seeds_and_asks_for_large_pages(engine_pool: Any) -> None:
    """malloc reads the variable when a process begins, so it must be in the environment of that moment."""

    def found(engine: Any) -> tuple[str, bool]:
        def name(worker: Any) -> str:
            return type(worker.model_runner.sampler).__name__

        began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
        return engine._llm.collective_rpc(name)[0], b"GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in began_with

    assert in_engine(engine_pool.handles[0], found) == ("SeededSampler", True)


def test_every_variable_of_vllm_that_an_engine_gets_is_one_that_vllm_knows() -> None:
    from vllm import envs

    ours = engine_env(RolloutConfig(), (), on_cpu=True)
    assert [name for name in ours if name.startswith("VLLM_") and name not in envs.environment_variables] == []


def test_the_deadline_of_a_start_grows_with_the_weights(tmp_path: Path) -> None:
    """Worked by hand for Qwen3-235B-A22B: 470 GB in bf16 at 0.2 GB/s are 2350 s. What storage gives is not measured."""
    for part in range(2):
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.truncate(235 * 10**9)  # a hole: it takes no space
    reason = "rollout.start_timeout_s is not set, so 600 s and 470.0 GB of weights at 0.2 GB/s"
    assert start_deadline(RolloutConfig(), tmp_path) == (2950.0, reason)
    assert start_deadline(RolloutConfig(start_timeout_s=90.0), tmp_path) == (90.0, "rollout.start_timeout_s = 90")


def test_a_start_that_takes_too_long_says_whose_deadline_it_was(ray_cluster: None) -> None:
    with pytest.raises(EngineError, match=r"^engine 0 did not start within 0 s \(rollout.start_timeout_s = 90\)$"):
        gather([ray.ObjectRef.from_random()], 0.0, "start", "rollout.start_timeout_s = 90")


def test_trainer_ranks_on_other_nodes_get_an_address_that_they_can_reach(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All engines are on this node. The loopback serves only if all ranks are here, too."""

    @ray.remote(num_cpus=0)
    class Engine:
        def ready(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    engine = Engine.remote()
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.1.2.3")
    group = EngineGroup([engine], workers_per_engine=1, timeout_s=240.0)
    for world, here, address in (("2", "2", "127.0.0.1"), ("2", "1", "10.1.2.3")):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        assert group.address == address
    ray.kill(engine)
