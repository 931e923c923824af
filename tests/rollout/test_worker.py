"""What we put into vLLM's workers, compared with what vLLM has there."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from or1_megatron.rollout.worker import CpuSampler, RequestSeeds

VOCABULARY = 50


def generators(seeds: range) -> dict[int, torch.Generator]:
    return {index: torch.Generator().manual_seed(seed) for index, seed in enumerate(seeds)}


@pytest.mark.parametrize("top_p", [None, 0.8])
def test_cpu_sampler_equals_vllm_s_to_the_bit(top_p: float | None) -> None:
    """While requests begin, wait for their turn, come back at other places of the batch, and end; over 100 tokens.

    vLLM's own sampler, with generators of the same seeds, is the oracle. That an engine uses ours is not shown here.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    oracle, sampler = TopKTopPSampler("processed_logprobs"), CpuSampler()
    assert oracle.forward == oracle.forward_cpu
    theirs, ours, chance = generators(range(12)), generators(range(12)), random.Random(1)
    for _ in range(100):
        running = chance.sample(range(12), chance.randrange(1, 12))
        logits = 3 * torch.randn(len(running), VOCABULARY)
        p = None if top_p is None else torch.full((len(running),), top_p)
        expected = oracle(logits.clone(), {row: theirs[each] for row, each in enumerate(running)}, None, p)
        found = sampler(logits.clone(), {row: ours[each] for row, each in enumerate(running)}, None, p)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_requests_without_a_seed_do_not_change_the_others() -> None:
    seeds, alone = RequestSeeds(), RequestSeeds()
    first = seeds.of_batch(3, {1: torch.Generator().manual_seed(7)})
    assert first[1] == alone.of_batch(1, {0: torch.Generator().manual_seed(7)})[0]
    assert len({*first.tolist()}) == 3


def test_seeds_of_ended_requests_are_forgotten() -> None:
    seeds = RequestSeeds()
    kept = torch.Generator().manual_seed(1)
    seeds.of_batch(2, {0: kept, 1: torch.Generator().manual_seed(2)})
    gc.collect()
    assert list(seeds._drawn) == [kept]
