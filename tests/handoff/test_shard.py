"""Handoffs by slices from trainers of several layouts to real engines; transformers is the oracle.

The trainer's ranks are threads with shards cut by the table: a real Megatron policy hands off in tests/parallel.
Not tried here: several nodes, CUDA, mixtures of experts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_fixtures import MAX_MODEL_TOKENS, RUN_ID, TinyModel, rollout_config
from rigs import in_engine, perturbed, scores
from sharded_trainer import Grid, Trainer
from tiny_models import make_tiny

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.handoff.shard.forecast import expected_wants
from or1_megatron.rollout.pool import EngineError, EnginePool
from or1_megatron.weights.holdings import Box, box_size
from or1_megatron.weights.qwen2 import QWEN2

TRANSPORTS = ("gloo", "shared_memory", "gloo+shared_memory")  # that run here
VOCABULARY = 61
PROBE = probe_tokens(VOCABULARY, 40)
CONFIG = HandoffConfig(backend="shard", bucket_bytes=200_000, timeout_s=240.0)


def over(transport: str) -> HandoffConfig:
    return CONFIG.model_copy(update={"transport": transport})


def difference(control: Any, model: Any) -> float:
    return compare_probe(control.score_prompts(PROBE), scores(model, PROBE), bound=1e-4)


@pytest.fixture(scope="module")
def pools(tiny_model: TinyModel, ray_cluster: None, tmp_path_factory: Any) -> Iterator[dict[str, Any]]:
    """Two single engines on an untied model, and one of two ranks on a tied one.

    D = 32, and a vocabulary that neither trainer nor engine ranks share evenly.
    """
    made: dict[str, Any] = {}
    for kind, changes in {"single": {}, "tensor": {"engines": 1, "tensor_parallel": 2}}.items():
        folder = tmp_path_factory.mktemp(kind)
        oracle = make_tiny(folder, "qwen2", hidden_size=128, num_hidden_layers=2, tie_word_embeddings=kind == "tensor")
        for path in tiny_model.folder.glob("*token*"):
            shutil.copy(path, folder)
        pool = EnginePool(
            rollout_config(**changes),
            folder,
            "float32",
            MAX_MODEL_TOKENS,
            f"{RUN_ID}-shard-{kind}",
            on_cpu=True,
            weight_transfer="shard",
        )
        made[kind] = (pool, oracle)
    for pool, _ in made.values():
        pool.wait_ready()
    yield made
    for pool, _ in made.values():
        pool.close()


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
        control.certify(version)
        assert difference(control, trainer.grid.model) < 1e-4
        stats = trainer.senders[0].stats
        assert all(each.bytes_sent for each in stats[: trainer.grid.world])
        received = sum(each.bytes_received for each in stats[trainer.grid.world :])
        # What tensor parallelism does not cut (norms and the row-parallel layers' none) every rank receives whole.
        norms = sum(4 * p.numel() for name, p in model.named_parameters() if "norm" in name)
        shards = control.engines * (model_bytes(model) + (control.workers_per_engine - 1) * norms)
        assert shards <= received <= 1.02 * shards
        if layout == (1, 1, 1):  # one trainer rank, two engines: it sends to the first, which passes on
            assert [each.bytes_sent for each in stats] == [received // 2, received // 2, 0]
        elif "+" not in transport:
            assert max(each.bytes_sent for each in stats) <= 0.6 * received
    assert_loaders_asked_as_forecast(trainer, control.workers_per_engine)
    trainer.close()


def test_gathering_backend_reaches_every_rank_of_an_engine(pools: Any) -> None:
    """Whole tensors go from a trainer of TP 2 x PP 2 to an engine of two ranks: the first passes on to the second."""
    pool, model = pools["tensor"]
    control = pool.control(CONFIG.timeout_s)
    config = CONFIG.model_copy(update={"backend": "gloo", "transport": None})
    trainer = Trainer(Grid(perturbed(model, seed=6), 2, 1, 2), config, control)
    trainer.send(6)
    assert difference(control, trainer.grid.model) < 1e-4
    rank_0, *engine_ranks = trainer.senders[0].stats
    assert [each.bytes_received for each in engine_ranks] == [rank_0.bytes_sent] * 2
    assert [each.bytes_sent for each in engine_ranks] == [rank_0.bytes_sent, 0]
    trainer.close()


def assert_loaders_asked_as_forecast(trainer: Trainer, engine_tensor: int) -> None:
    """``or1 plan-handoff`` foretells what the loaders ask for; here it is compared with what they asked for."""
    received: dict[tuple[int, str], list[Box]] = {}
    for rank, sender in enumerate(trainer.senders):
        for shipment in sender.transfer.plan.sent_by(rank):
            for slot in shipment.slots:
                for destination in shipment.destinations:
                    received.setdefault((destination - trainer.grid.world, slot.slice.name), []).append(slot.slice.box)
    for (rank, name), boxes in received.items():
        wants = expected_wants(QWEN2, trainer.grid.hf, torch.float32, rank % engine_tensor, engine_tensor)
        (box,) = (want.box for want in wants if want.name == name)
        hull = tuple((min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*boxes, strict=True))
        assert hull == box, f"engine rank {rank}: {name}"
        assert sum(map(box_size, boxes)) == box_size(box)


def test_only_a_padded_vocabulary_needs_its_loaders(pools: Any) -> None:
    """What engines compute is compared above; here most slices must have taken the short way there."""
    pool, model = pools["single"]
    trainer = Trainer(Grid(model, 1, 1, 1), CONFIG, pool.control(CONFIG.timeout_s))
    trainer.send(3)

    def placed(engine: Any) -> set[str]:
        import gc

        from or1_megatron.handoff.shard.direct_copy import DirectCopy

        return set[str]().union(*(found.names for found in gc.get_objects() if isinstance(found, DirectCopy)))

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
