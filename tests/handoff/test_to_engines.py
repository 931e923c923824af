"""Handoffs by slices from trainers of several layouts to real engines; transformers is the oracle.

The trainer's ranks are threads with shards cut by the table: a real Megatron policy hands off in tests/parallel.
Not tried here: several nodes, CUDA.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixtures import MAX_MODEL_TOKENS, RUN_ID, TinyModel, decode, requests, rollout_config
from rigs import in_engine, perturbed, scores
from sharded_trainer import Grid, Trainer
from tiny_models import make_tiny

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.kernels.sampling import sample
from or1_megatron.rollout.engine_pool import EngineError, EnginePool
from or1_megatron.rollout.request_plan import row_keys
from or1_megatron.types import Sampling

TRANSPORTS = ("gloo", "shared_memory", "gloo+shared_memory")  # that run here
VOCABULARY = 61
PROBE = probe_tokens(VOCABULARY, 40)
CONFIG = HandoffConfig(bucket_bytes=200_000, timeout_s=240.0)

MIXTURES: dict[str, tuple[int, dict[str, int]]] = {
    "glm4_moe": (1, {}),
    "gpt_oss": (2, {"head_dim": 32, "intermediate_size": 128}),  # what vLLM computes on CPU
    "deepseek_v3": (2, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),  # also
}
"""Ranks of an engine, and changes of the model's config."""


def over(transport: str) -> HandoffConfig:
    return CONFIG.model_copy(update={"transport": transport})


def difference(control: Any, model: Any) -> float:
    return compare_probe(control.score_prompts(PROBE), scores(model, PROBE), bound=1e-4)


def started(
    folder: Any, tokenizer: TinyModel, name: str, engines: int, tensor: int, dtype: Any = "float32", **changes: Any
) -> Any:
    """Return engines that start with a model, and the model in transformers."""
    model = make_tiny(folder, name, dtype, num_hidden_layers=2, **changes)
    for path in tokenizer.folder.glob("*token*"):
        shutil.copy(path, folder)
    config, run_id = rollout_config(engines=engines, tensor_parallel=tensor), f"{RUN_ID}-{name}-{engines}-{tensor}"
    return EnginePool(config, folder, dtype, MAX_MODEL_TOKENS, run_id, on_cpu=True), model


@pytest.fixture(scope="module")
def pools(tiny_model: TinyModel, ray_cluster: None, tmp_path_factory: Any) -> Iterator[dict[str, Any]]:
    """Two single engines on an untied model, and one of two ranks on a tied one.

    D = 32, and a vocabulary that neither trainer nor engine ranks share evenly.
    """
    made: dict[str, Any] = {}
    for kind, engines, tensor in (("single", 2, 1), ("tensor", 1, 2)):
        changes = {"hidden_size": 128, "tie_word_embeddings": kind == "tensor"}
        made[kind] = started(tmp_path_factory.mktemp(kind), tiny_model, "qwen2", engines, tensor, **changes)
    for pool, _ in made.values():
        pool.wait_ready()
    yield made
    for pool, _ in made.values():
        pool.close()


def handed_off(pool: Any, model: Any) -> Iterator[tuple[Any, Any]]:
    """Hand off two changed models, one after the other; yield (engines, model) when the engines serve it."""
    pool.wait_ready()
    control = pool.control(CONFIG.timeout_s)
    trainer = Trainer(Grid(model, 2, 1, 2), CONFIG, control)
    for version in (1, 2):
        trainer.grid.model = perturbed(model, seed=version)
        trainer.send(version)
        control.resume_generation(version)
        yield control, trainer.grid.model
    trainer.close()
    pool.close()


@pytest.mark.parametrize(
    "name", ["gpt_oss", *(pytest.param(n, marks=pytest.mark.slow) for n in MIXTURES if n != "gpt_oss")]
)
def test_mixtures_compute_what_was_sent(name: str, tiny_model: TinyModel, ray_cluster: None, tmp_path: Any) -> None:
    """Correction biases and the factors that engines make of latents' weights change, too."""
    tensor, changes = MIXTURES[name]
    pool, model = started(tmp_path, tiny_model, name, 1, tensor, **changes)
    for control, sent in handed_off(pool, model):
        assert difference(control, sent) < 1e-4


@pytest.mark.parametrize(("name", "tensor"), [("qwen3_5", 1), ("qwen3_next", 2)])
def test_linear_attention_computes_what_was_sent(
    name: str, tensor: int, tiny_model: TinyModel, ray_cluster: None, tmp_path: Any
) -> None:
    """In bf16 and with heads of 64 channels: vLLM on CPU computes no others. Single log-probs differ by tenths then;
    with the weights from before the handoff the mean differs by more than ten times as much."""
    if name == "qwen3_5":
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 is also that of its model for images")
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "layer_types": None}
    pool, model = started(tmp_path, tiny_model, name, 1, tensor, "bfloat16", **heads)
    for control, sent in handed_off(pool, model):
        found = np.concatenate(control.score_prompts(PROBE)[0])
        new, old = (np.concatenate(scores(copy.deepcopy(x).float(), PROBE)) for x in (sent, model))
        assert np.abs(found - new).mean() < min(0.1, np.abs(found - old).mean() / 10)


def model_bytes(model: Any) -> int:
    return sum(4 * p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "layout", "transport"),
    [
        ("single", (1, 1, 1), "gloo"),
        ("single", (2, 2, 2), "gloo"),
        ("single", (2, 1, 2), "shared_memory"),
        ("single", (2, 1, 1), "gloo+shared_memory"),
        ("tensor", (2, 1, 1), "gloo"),
        ("tensor", (1, 1, 2), "shared_memory"),
        ("tensor", (1, 2, 2), "gloo+shared_memory"),
    ],
)
def test_engines_compute_what_was_sent(pools: Any, kind: str, layout: tuple[int, int, int], transport: str) -> None:
    """Two handoffs share a connection; every rank sends, and each engine rank gets its shard's bytes and no more."""
    pool, model = pools[kind]
    control = pool.control(CONFIG.timeout_s)
    trainer = Trainer(Grid(model, *layout), over(transport), control)
    for version in (1, 2):
        trainer.grid.model = perturbed(model, seed=version)
        trainer.send(version)
        control.resume_generation(version)
        assert difference(control, trainer.grid.model) < 1e-4
        plan = trainer.senders[0].plan
        sent = plan.bytes_sent()
        assert all(sent[rank] for rank in range(trainer.grid.world))
        received = sum(s.size_bytes * len(s.destinations) for s in plan.shipments)
        # What tensor parallelism does not cut (norms and the row-parallel layers' none) every rank receives whole.
        norms = sum(4 * p.numel() for name, p in model.named_parameters() if "norm" in name)
        shards = control.engines * (model_bytes(model) + (control.workers_per_engine - 1) * norms)
        assert shards <= received <= 1.02 * shards
        if "+" not in transport:
            assert max(sent.values()) <= max(0.6, 1 / trainer.grid.world) * received
    trainer.close()


def test_engine_ranks_draw_from_the_whole_vocabulary(pools: Any) -> None:
    """Two ranks, each with a part of 61 logits: tokens, log-probs, entropies are those of whole rows."""
    pool, model = pools["tensor"]
    trainer = Trainer(Grid(model, 1, 1, 1), CONFIG, pool.control(CONFIG.timeout_s))
    trainer.send(3)
    pool.control(CONFIG.timeout_s).resume_generation(3)
    trainer.close()
    sent, drawn = requests(Sampling(0.8, 1.0, 24), seed=(1 << 64) - 9000, each=4), []
    for asked, made in zip(sent, decode(pool.handles[0], sent), strict=True):
        count, ids = len(made.token_ids), [*asked.prompt.token_ids.tolist(), *made.token_ids.tolist()]
        keys = torch.from_numpy(row_keys(np.full(count, asked.seed, dtype=np.uint64), np.arange(count)))
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0, -count - 1 : -1]
        whole = sample(rows, keys, torch.full((count,), 0.8))
        assert made.token_ids.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(made.log_probs, whole.log_probs, atol=1e-4)
        assert made.entropy == pytest.approx(float(whole.entropies.mean()), abs=1e-4)
        drawn += whole.tokens.tolist()
    assert min(drawn) < VOCABULARY // 2 < max(drawn)  # both ranks' parts


def test_only_a_padded_vocabulary_needs_its_loaders(pools: Any) -> None:
    """What engines compute is compared above; here most slices must have taken the short way there."""
    pool, model = pools["single"]
    trainer = Trainer(Grid(model, 1, 1, 1), CONFIG, pool.control(CONFIG.timeout_s))
    trainer.send(3)

    def placed(engine: Any) -> set[str]:
        import gc

        from or1_megatron.handoff.vllm.direct_copy import DirectCopy

        return set[str]().union(*(made.names for made in gc.get_objects() if isinstance(made, DirectCopy)))

    names = {name for name, _ in model.named_parameters()}
    assert names - in_engine(pool.handles[0], placed) == {"model.embed_tokens.weight", "lm_head.weight"}
    trainer.close()


def test_embeddings_that_compute_no_logits_are_not_packed(pools: Any) -> None:
    """vLLM packs a copy of every embedding for oneDNN; before and after a handoff only the output layer has one.

    That the output layer computes with the new weights is shown above; that memory is freed is not shown here.
    """
    pool, model = pools["single"]
    trainer = Trainer(Grid(model, 1, 1, 1), CONFIG, pool.control(CONFIG.timeout_s))

    def packed(engine: Any) -> list[str]:
        def names(model: Any) -> list[str]:
            found = {name: getattr(layer, "cpu_linear", None) for name, layer in model.named_modules()}
            return [name for name, gemm in found.items() if gemm not in (None, torch.nn.functional.linear)]

        return engine._llm.apply_model(names)[0]  # type: ignore[no-any-return]

    def outside_layers() -> list[str]:
        return [name for name in in_engine(pool.handles[0], packed) if "layers" not in name]

    assert outside_layers() == ["lm_head"]
    trainer.send(4)
    assert outside_layers() == ["lm_head"]
    trainer.close()


def test_update_that_never_ended_is_given_up_by_the_next(pools: Any) -> None:
    """That happens when another engine failed after this one had all of its weights."""
    pool, model = pools["single"]
    control = pool.control(CONFIG.timeout_s)
    control.start_weight_update()
    with pytest.raises(EngineError, match=r"engine \d cannot score prompts: an update of its weights did not come to"):
        control.score_prompts(PROBE)
    trainer = Trainer(Grid(perturbed(model, seed=4), 1, 2, 1), CONFIG, control)
    trainer.send(3)
    assert difference(control, trainer.grid.model) < 1e-4
    trainer.close()
