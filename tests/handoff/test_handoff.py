"""Weights from this process, and from a trainer of two ranks, to two real engines; transformers is the oracle.

Not tried here: engines with several workers, CUDA, a real Megatron policy (tests of train and the quickstart do that).
"""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from engine_fixtures import RUN_ID, WORDS, TinyModel, decode, prompt

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.errors import HandoffMismatch
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.handoff.sender import EngineWeightSender
from or1_megatron.rollout.cluster import namespace
from or1_megatron.rollout.pool import EnginePool
from or1_megatron.types import Float32Array, Int32Array, Request, Sampling, VersionSpan

CONFIG = HandoffConfig(bucket_bytes=40_000, timeout_s=60.0)  # of about 300,000 bytes of weights
PROBE = probe_tokens(len(WORDS), 40)


class StateDictShards:
    """``interfaces.WeightShards`` over an HF model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.model.state_dict().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.state_dict().items()


def perturbed(model: TinyModel, seed: int) -> TinyModel:
    """The model with every tensor changed by noise of its own size."""
    oracle = copy.deepcopy(model.oracle)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.3 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator))
    return TinyModel(model.folder, oracle)


def scores(model: TinyModel, sequences: list[Int32Array] = PROBE) -> list[Float32Array]:
    return [model.log_probs(ids[:1].tolist(), ids[1:].tolist()).astype(np.float32) for ids in sequences]


@pytest.fixture(scope="module")
def sender(tiny_model: TinyModel, engine_pool: EnginePool) -> Iterator[EngineWeightSender]:
    """Sends whatever ``sender.shards.model`` is; puts the folder's weights back at the end."""
    shards = StateDictShards(tiny_model.oracle)
    sender = EngineWeightSender(shards, 0, CONFIG, engine_pool.control(CONFIG.timeout_s))
    sender.shards = shards  # type: ignore[attr-defined]
    yield sender
    shards.model = tiny_model.oracle
    sender.send(0)
    engine_pool.control(10.0).certify(0)
    sender.close()


def test_engines_compute_what_was_sent_and_say_its_version(
    tiny_model: TinyModel, engine_pool: EnginePool, sender: Any
) -> None:
    """The same prompt before and after: a prefix cache that outlived the update would show in the log-probs."""
    requests = [
        Request(prompt([2, *range(5, 20)] * 3 + [index], name=str(index)), 0, Sampling(1.0, 1.0, 24), 70 + index)
        for index in range(6)
    ]
    for handle in engine_pool.handles:
        decode(handle, requests)
    for version in (3, 4):
        new = perturbed(tiny_model, seed=version)
        sender.shards.model = new.oracle
        assert sender.send(version) >= sum(p.numel() * 4 for p in new.oracle.parameters())
        assert engine_pool.control(10.0).versions() == [version, version]
        assert compare_probe(sender.probe(PROBE), scores(new), bound=1e-4) < 1e-4
        engine_pool.control(10.0).certify(version)
        for handle in engine_pool.handles:
            for completion, request in zip(decode(handle, requests), requests, strict=True):
                expected = new.log_probs(request.prompt.token_ids.tolist(), completion.token_ids.tolist())
                np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
                assert completion.versions == (VersionSpan(version, 0),)


def test_one_wrong_tensor_fails_the_certificate(tiny_model: TinyModel, sender: Any) -> None:
    """Wrong by a swap of two rows of one layer's bias, which no shape check sees."""
    wrong = copy.deepcopy(tiny_model.oracle)
    with torch.no_grad():
        bias = wrong.model.layers[1].self_attn.q_proj.bias
        bias[:2] = bias[:2].flip(0)
    sender.shards.model = wrong
    sender.send(5)
    with pytest.raises(HandoffMismatch, match="engine 0 does not compute what the policy computes"):
        compare_probe(sender.probe(PROBE), scores(tiny_model), bound=1e-3)


def test_iteration_that_disagrees_with_metadata_is_refused_by_name(tiny_model: TinyModel) -> None:
    """On the trainer's side, before anything wrong is sent."""
    from or1_megatron.handoff.gather.trainer import _next_tensor
    from or1_megatron.handoff.message.buckets import TensorSpec

    tensors = iter([("b", torch.zeros(2))])
    with pytest.raises(ValueError, match=r"declares 'a' torch.float32 \(2,\), iteration yields 'b'"):
        _next_tensor(tensors, TensorSpec("a", torch.float32, (2,)))
    with pytest.raises(ValueError, match="ended before 'a'"):
        _next_tensor(iter([]), TensorSpec("a", torch.float32, (2,)))


@pytest.mark.slow
def test_trainer_of_two_ranks_beside_its_own_process_group(
    tiny_model: TinyModel, engine_pool: EnginePool, sender: Any, tmp_path: Path
) -> None:
    new = perturbed(tiny_model, seed=9)
    torch.save(new.oracle.state_dict(), tmp_path / "weights.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ray.get_runtime_context().gcs_address
    arguments = [tmp_path / "weights.pt", address, namespace(RUN_ID), 1 << 30, 11, 12]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("trainer_ranks.py")), *map(str, arguments)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    output = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(output)
    assert "SENT 11 " in output[0] and "SENT 12 " in output[0] and "SENT" not in output[1]
    assert engine_pool.control(10.0).versions() == [12, 12]
    assert compare_probe(engine_pool.control(10.0).score_prompts(PROBE), scores(new), bound=1e-4) < 1e-4
    # The engines have left this process's group for the other trainer's; meet again for the tests to come.
    sender.close()
