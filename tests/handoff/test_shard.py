"""Handoffs by slices from trainers of several layouts to real engines; transformers is the oracle.

The trainer's ranks are threads with shards cut by the table: a real Megatron policy hands off in tests/parallel.
Not tried here: several nodes, CUDA, mixtures of experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixtures import MAX_MODEL_TOKENS, RUN_ID, TinyModel, rollout_config
from rigs import in_engine
from sharded_trainer import Grid, Trainer

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.errors import HandoffError, SendError
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.handoff.shard.forecast import expected_wants
from or1_megatron.handoff.transport.base import GlooTransport
from or1_megatron.handoff.transport.shared_memory import SharedMemoryTransport
from or1_megatron.rollout.pool import EngineError, EnginePool
from or1_megatron.weights.holdings import Box, box_size
from or1_megatron.weights.qwen2 import QWEN2

TRANSPORTS = ("gloo", "shared_memory", "gloo+shared_memory")  # that run here
VOCABULARY = 61
PROBE = probe_tokens(VOCABULARY, 40)
CONFIG = HandoffConfig(backend="shard", bucket_bytes=200_000, timeout_s=240.0)


def over(transport: str) -> HandoffConfig:
    return CONFIG.model_copy(update={"transport": transport})


def make_model(folder: Path, tied: bool) -> TinyModel:
    """Make one of 4 heads in 2 groups, D = 32, with a vocabulary that neither trainer nor engine ranks share evenly."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    oracle = Qwen2ForCausalLM(config).float().eval()
    for name, parameter in oracle.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.12)
    oracle.save_pretrained(folder)
    return TinyModel(folder, oracle)


def write_tokenizer(tiny_model: TinyModel, folder: Path) -> None:
    for path in tiny_model.folder.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())


def renewed(model: Any, seed: int) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator))
    return other


def difference(control: Any, model: Any) -> float:
    oracle = TinyModel(Path(), model)
    expected = [oracle.log_probs(ids[:1].tolist(), ids[1:].tolist()).astype(np.float32) for ids in PROBE]
    return compare_probe(control.score_prompts(PROBE), expected, bound=1e-4)


@pytest.fixture(scope="module")
def pools(tiny_model: TinyModel, ray_cluster: None, tmp_path_factory: Any) -> Iterator[dict[str, Any]]:
    """Two single engines on an untied model, and one of two ranks on a tied one."""
    made: dict[str, Any] = {}
    for kind, changes in {"single": {}, "tensor": {"engines": 1, "tensor_parallel": 2}}.items():
        folder = tmp_path_factory.mktemp(kind)
        model = make_model(folder, tied=kind == "tensor")
        write_tokenizer(tiny_model, folder)
        pool = EnginePool(
            rollout_config(**changes),
            folder,
            "float32",
            MAX_MODEL_TOKENS,
            f"{RUN_ID}-shard-{kind}",
            on_cpu=True,
            weight_transfer="shard",
        )
        made[kind] = (pool, model.oracle)
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
        trainer.grid.model = renewed(model, seed=version)
        trainer.send(version)
        assert control.versions() == [version] * control.engines
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
    trainer = Trainer(Grid(renewed(model, seed=6), 2, 1, 2), config, control)
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


def same_shaped(shipment: Any) -> list[tuple[Any, Any]]:
    """Return pairs of slices of one shape in a message."""
    slots = shipment.slots
    return [(a, b) for i, a in enumerate(slots) for b in slots[i + 1 :] if a.slice.shape == b.slice.shape]


FAULTS = ["flipped bit", "dropped bucket", "swapped tensors", "bucket of the last handoff"]
SPOILT = [
    pytest.param(fault, transport, marks=[] if fault == FAULTS[0] or transport == "gloo" else pytest.mark.slow)
    for fault in FAULTS
    for transport in TRANSPORTS
]


@pytest.mark.parametrize(("fault", "transport"), SPOILT)
def test_what_the_transport_spoils_stops_the_run_by_name(
    pools: Any, fault: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault between packing and loading: the engine names the tensor, and refuses to serve until a whole handoff."""
    pool, model = pools["single"]
    control = pool.control(CONFIG.timeout_s)
    trainer = Trainer(Grid(model, 2, 1, 1), over(transport), control)
    trainer.send(3)
    sends = {kind: kind.send for kind in (GlooTransport, SharedMemoryTransport)}
    sent = trainer.senders[0].transfer.plan.sent_by(0)
    chosen = next(s for s in sent if s.round >= 1 and 3 in s.destinations and same_shaped(s))
    first, last = trainer.senders[0].transfer.links.between(0, chosen.children(0)[0]), dict[str, torch.Tensor]()

    def faulty(self: Any, buffer: torch.Tensor, destination: int, number: int) -> Any:
        if self is first and (destination, number) == (chosen.children(0)[0], chosen.number):
            if fault == "flipped bit":
                buffer[20] ^= 4
            elif fault == "dropped bucket":
                buffer.zero_()
            elif fault == "swapped tensors":
                one, two = (slot.view(buffer) for slot in same_shaped(chosen)[0])
                kept = one.clone()
                one.copy_(two)
                two.copy_(kept)
            elif last:
                buffer.copy_(last["buffer"])
            else:
                last["buffer"] = buffer.clone()
        return sends[type(self)](self, buffer, destination, number)

    for kind in sends:
        monkeypatch.setattr(kind, "send", faulty)
    if fault == "bucket of the last handoff":
        trainer.send(3)
    with pytest.raises(SendError, match=r"engine (rank )?[01].*'model\.[a-z0-9_.]+'\[.*did not arrive as it was sent"):
        trainer.send(3)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="did not come to its end"):
        control.score_prompts(PROBE)
    trainer.grid.model = renewed(model, seed=9)
    trainer.send(3)  # meets the engines anew
    assert difference(control, trainer.grid.model) < 1e-4
    trainer.close()


def test_update_that_never_ended_is_given_up_by_the_next(pools: Any) -> None:
    """That happens when another engine failed after this one had all of its weights."""
    pool, model = pools["single"]
    control = pool.control(CONFIG.timeout_s)
    control.start_weight_update()
    with pytest.raises(EngineError, match=r"engine \d cannot score prompts: an update of its weights did not come to"):
        control.score_prompts(PROBE)
    trainer = Trainer(Grid(renewed(model, seed=4), 1, 2, 1), CONFIG, control)
    trainer.send(3)
    assert difference(control, trainer.grid.model) < 1e-4
    trainer.close()


def test_rank_that_fails_ends_everybodys_wait(pools: Any) -> None:
    """It ends with the cause: else a deadline that has passed would be named."""
    pool, model = pools["single"]
    trainer = Trainer(Grid(model, 2, 1, 1), CONFIG, pool.control(CONFIG.timeout_s))
    trainer.send(3)

    def broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise HandoffError("out of memory")

    trainer.weights[1].tamper = broken
    with pytest.raises(SendError, match="trainer rank 1: out of memory"):
        trainer.send(3)
    trainer.weights[1].tamper = lambda name, tensor: tensor
    trainer.send(3)
    assert difference(pool.control(CONFIG.timeout_s), trainer.grid.model) < 1e-4
    trainer.close()
