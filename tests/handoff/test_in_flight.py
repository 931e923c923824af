"""Handoffs under requests that are being decoded: every token is of the weights that its span names.

transformers, with each version's weights, is the oracle of each span's log-probs given all tokens before it. A real
engine on CPU; asynchronous scheduling, which GPUs have, is not tried, nor a handoff while the KV cache is full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from engine_fixtures import WORDS, TinyModel, decode, prompt
from rigs import TamperedTrainer, in_engine, perturbed, scores

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.probe import compare_probe, probe_tokens
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Completion, Request, Sampling

DEADLINE_S = 240.0
CONFIG = HandoffConfig(bucket_bytes=40_000, timeout_s=DEADLINE_S)
PROBE = probe_tokens(len(WORDS), 48)
STEPS = 40  # iterations between the submission of requests and the change of weights


def requests(count: int, seed: int) -> list[Request]:
    """More than the engine decodes at once (32), so that some wait; with a common beginning of two KV blocks."""
    shared = [2, *range(5, 20)] * 4
    return [
        Request(prompt([*shared, index % 20], name=str(index)), 0, Sampling(1.0, 1.0, 60), seed + index)
        for index in range(count)
    ]


def submit_with_next_update(handle: Any, sent: list[Request]) -> None:
    """The next update finds these requests exactly so many iterations old, however busy the machine is."""
    packed = pack(sent)

    def work(engine: Any) -> None:
        true = engine.start_weight_update

        def start_weight_update() -> None:
            del engine.start_weight_update
            engine.submit(unpack(packed))
            for _ in range(STEPS):
                engine._iterate()
            true()

        engine.start_weight_update = start_weight_update

    in_engine(handle, work)


def harvest(handle: Any, wait_s: float = 1.0) -> dict[int, Completion]:
    """By seed."""
    got = unpack(ray.get(handle.harvest.remote(wait_s), timeout=DEADLINE_S))
    return {completion.seed: completion for completion in got.completions}


def harvest_all(handle: Any, sent: list[Request]) -> list[Completion]:
    found: dict[int, Completion] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < len(sent) and time.monotonic() < deadline:
        found |= harvest(handle)
    return [found[request.seed] for request in sent]


def by_version(request: Request, completion: Completion, models: dict[int, TinyModel]) -> dict[int, float]:
    """Largest difference from each span's oracle."""
    ends = [*(span.first_token for span in completion.versions[1:]), len(completion.token_ids)]
    worst: dict[int, float] = {}
    for span, end in zip(completion.versions, ends, strict=True):
        expected = models[span.version].log_probs(request.prompt.token_ids.tolist(), completion.token_ids.tolist())
        difference = np.abs(completion.log_probs - expected)[span.first_token : end]
        worst[span.version] = float(difference.max())
    return worst


@pytest.fixture(scope="module")
def trainer(tiny_model: TinyModel, engine_pool: EnginePool) -> Iterator[Any]:
    control = engine_pool.control(DEADLINE_S)
    trainer = TamperedTrainer(tiny_model.oracle, CONFIG, control)
    yield trainer
    trainer.send(tiny_model.oracle, 0)
    control.resume_generation(0)
    trainer.close()


def test_spans_agree_with_their_versions_weights(tiny_model: TinyModel, engine_pool: EnginePool, trainer: Any) -> None:
    control, handle = engine_pool.control(DEADLINE_S), engine_pool.handles[0]
    models = {version: TinyModel(tiny_model.folder, perturbed(tiny_model.oracle, version)) for version in (1, 2)}
    trainer.send(models[1].oracle, 1)
    compare_probe(control.score_prompts(PROBE), scores(models[1].oracle, PROBE), bound=1e-4)
    control.resume_generation(1)
    sent = requests(80, seed=1000)
    submit_with_next_update(handle, sent)
    trainer.send(models[2].oracle, 2)
    late = requests(6, seed=9000)
    ray.get(handle.submit.remote(pack(late)), timeout=DEADLINE_S)  # held until the weights are checked
    assert compare_probe(control.score_prompts(PROBE), scores(models[2].oracle, PROBE), bound=1e-4) < 1e-4
    assert harvest(handle, wait_s=0.3) == {}  # nothing is served before the weights are checked
    control.resume_generation(2)
    completions = harvest_all(handle, sent + late)
    mixed = [(r, c) for r, c in zip(sent, completions, strict=False) if len(c.versions) == 2]
    assert sum(STEPS - 2 <= completion.versions[1].first_token < 60 for _, completion in mixed) >= 10
    assert {c.versions[0].version for c in completions[: len(sent)]} == {1, 2}  # some waited all the time
    worst = {1: 0.0, 2: 0.0}
    for request, completion in zip(sent, completions, strict=False):
        assert completion.versions[0].first_token == 0
        for version, difference in by_version(request, completion, models).items():
            worst[version] = max(worst[version], difference)
    assert max(worst.values()) < 1e-4
    for request, completion in zip(late, completions[len(sent) :], strict=True):
        assert [span.version for span in completion.versions] == [2]
        assert by_version(request, completion, models)[2] < 1e-4
    again = requests(6, seed=9500)  # the old prompts' blocks are no longer to be found
    for request, completion in zip(again, decode(handle, again), strict=True):
        assert by_version(request, completion, models)[2] < 1e-4
