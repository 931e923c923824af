"""The gathering backend, from a trainer of two ranks to two real engines; transformers is the oracle.

Not tried here: engines with several workers, CUDA, a real Megatron policy (tests of train and the quickstart do that).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ranks
import ray
import torch
import torch.distributed as dist
from engine_fixtures import RUN_ID, WORDS, TinyModel, decode, prompt
from rigs import perturbed, scores
from sharded_trainer import Grid, Trainer

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.errors import HandoffError, SendError
from or1_megatron.handoff.gather import Gathered
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.rollout.cluster import namespace
from or1_megatron.rollout.pool import EnginePool
from or1_megatron.types import Request, Sampling, VersionSpan

CONFIG = HandoffConfig(backend="gloo", bucket_bytes=40_000, timeout_s=240.0)  # of about 300,000 bytes of weights
PROBE = probe_tokens(len(WORDS), 40)


@pytest.fixture(scope="module")
def trainer(tiny_model: TinyModel, engine_pool: EnginePool) -> Iterator[Trainer]:
    """Two ranks, of which the first sends whole tensors; puts the folder's weights back at the end."""
    control = engine_pool.control(CONFIG.timeout_s)
    trainer = Trainer(Grid(tiny_model.oracle, 2, 1, 1), CONFIG, control)
    yield trainer
    trainer.grid.model = tiny_model.oracle
    trainer.send(0)
    control.certify(0)
    trainer.close()


def test_engines_compute_what_was_sent_and_say_its_version(
    tiny_model: TinyModel, engine_pool: EnginePool, trainer: Trainer
) -> None:
    """The same prompt before and after: a prefix cache that outlived the update would show in the log-probs."""
    control = engine_pool.control(CONFIG.timeout_s)
    requests = [
        Request(prompt([2, *range(5, 20)] * 3 + [index], name=str(index)), 0, Sampling(1.0, 1.0, 24), 70 + index)
        for index in range(6)
    ]
    for handle in engine_pool.handles:
        decode(handle, requests)
    for version in (3, 4):
        new = perturbed(tiny_model.oracle, seed=version)
        trainer.grid.model = new
        model_bytes = sum(p.numel() * 4 for p in new.parameters())
        sent = trainer.send(version)
        assert model_bytes <= sent[0] <= 1.02 * model_bytes and sent[1] == 0  # the second engine gets it from the first
        assert compare_probe(control.score_prompts(PROBE), scores(new, PROBE), bound=1e-4) < 1e-4
        control.certify(version)
        oracle = TinyModel(tiny_model.folder, new)
        for handle in engine_pool.handles:
            for completion, request in zip(decode(handle, requests), requests, strict=True):
                expected = oracle.log_probs(request.prompt.token_ids.tolist(), completion.token_ids.tolist())
                np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
                assert completion.versions == (VersionSpan(version, 0),)


def test_a_rank_that_cannot_gather_fails_the_handoff_on_all(
    tiny_model: TinyModel, engine_pool: EnginePool, trainer: Trainer
) -> None:
    """Engines and the other rank hear of it, long before their deadline; the next handoff is good."""

    def broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise HandoffError("the policy's memory is gone")

    trainer.weights[0].tamper = broken
    with ThreadPoolExecutor(2) as pool:
        sends = [pool.submit(sender.send, 6) for sender in trainer.senders]
        errors = [send.exception() for send in sends]
    assert [str(error) for error in errors] == ["the policy's memory is gone"] * 2
    assert all(isinstance(error, SendError) for error in errors)
    trainer.weights[0].tamper = lambda name, tensor: tensor
    trainer.grid.model = perturbed(tiny_model.oracle, seed=7)
    trainer.send(7)
    control = engine_pool.control(CONFIG.timeout_s)
    compare_probe(control.score_prompts(PROBE), scores(trainer.grid.model, PROBE), bound=1e-4)


class Undeclared:
    """Weights of which the second tensor is not what metadata() says."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [("a", torch.float32, (2,)), ("b", torch.float32, (3,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.arange(2.0)
        yield "b", torch.zeros(4)


def test_iteration_that_disagrees_with_metadata_is_refused_by_name() -> None:
    """On the trainer's side, before anything wrong is sent."""
    weights: Any = Undeclared()
    gathered = Gathered(weights)
    assert gathered.read("a", ((1, 2),)).tolist() == [1.0]
    with pytest.raises(ValueError, match=r"declares 'b' torch.float32 \(3,\), iteration yields 'b' torch.float32 \(4,"):
        gathered.read("b", ((0, 3),))
    weights.metadata = lambda: [*Undeclared().metadata()[:1], ("c", torch.float32, (1,))]
    gathered = Gathered(weights)
    gathered.finish()
    with pytest.raises(ValueError, match="ended before 'a'"):
        gathered.read("a", ((0, 2),))


class HalvedWeights:
    """What the gathering backend needs of ``interfaces.PolicyWeights``: flat halves, joined at iteration."""

    ranks = 2

    def __init__(self, weights: dict[str, torch.Tensor], rank: int) -> None:
        self.shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
        self.halves = {name: tensor.flatten().chunk(2)[rank].clone() for name, tensor in weights.items()}

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, dtype, shape) for name, (dtype, shape) in self.shapes.items()]

    def from_rank_0(self, value: Any) -> Any:
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, half in self.halves.items():
            parts = [torch.empty_like(half), torch.empty_like(half)]
            dist.all_gather(parts, half)
            whole = torch.cat(parts).view(self.shapes[name][1])
            yield name, whole if dist.get_rank() == 0 else None


def send_as_a_rank(weights: dict[str, torch.Tensor], ray_address: str, engines: str, versions: list[int]) -> list[int]:
    """Send from one of two ranks; return the bytes sent in each handoff."""
    from or1_megatron.handoff.sender import make_sender
    from or1_megatron.rollout import cluster
    from or1_megatron.rollout.engine_group import EngineGroup

    control = None
    if dist.get_rank() == 0:
        cluster.start_ray(ray_address, "trainer-of-tests")
        handles = [ray.get_actor(f"engine-{index}", namespace=engines) for index in range(2)]
        control = EngineGroup(handles, workers_per_engine=1, timeout_s=240.0)
    halved: Any = HalvedWeights(weights, dist.get_rank())
    sender = make_sender(halved, dist.get_rank(), HandoffConfig(backend="gloo", timeout_s=240.0), control)
    sent = []
    for version in versions:
        sent.append(sender.send(version))
        dist.barrier()  # the trainer's own group works on, between handoffs
    sender.close()
    return sent


@pytest.mark.slow
def test_trainer_of_two_ranks_beside_its_own_process_group(
    tiny_model: TinyModel, engine_pool: EnginePool, trainer: Trainer
) -> None:
    """Processes without Megatron, which gather over their default process group, as a policy would."""
    new = perturbed(tiny_model.oracle, seed=9)
    address = ray.get_runtime_context().gcs_address
    sent = ranks.call(send_as_a_rank, 2, dict(new.state_dict()), address, namespace(RUN_ID), [11, 12])
    assert all(bytes_sent > 0 for bytes_sent in sent[0]) and sent[1] == [0, 0]
    control = engine_pool.control(CONFIG.timeout_s)
    control.certify(12)
    assert compare_probe(control.score_prompts(PROBE), scores(new, PROBE), bound=1e-4) < 1e-4
    # The engines have left this process's group for the other trainer's; meet again for the tests to come.
    trainer.close()
