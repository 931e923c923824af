"""Plans a rollout's requests, seeds and groups, and chooses the engine of each waiting request (load balancing).

This module needs no engine and no Ray.

A rollout of P prompts with group size M is P * M requests. A request's seed depends only on the rollout's seed and on
the request's place, so the same rollout can be sampled again on any number of engines.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from or1_megatron.rollout.refill import SamplingBudget
from or1_megatron.types import Completion, Group, Prompt, Request, Sampling
from or1_verify.types import Verdict

RequestKey = tuple[int, int]
"""(index of the prompt in the rollout, index of the sample in its group)."""

_SEED_BITS = 63  # engines take 64 bits; signed 64-bit integers survive every serialisation on the way


def request_seed(*parts: int) -> int:
    """Return a request's seed in [0, 2**63), from (rollout seed, prompt index, sample index).

    It has 63 bits, so that the thousands of seeds of a rollout all differ. It is a BLAKE2b hash of the decimal digits:
    the same on every machine and Python version. Seeds of neighbouring indices are unrelated.
    """
    digest = hashlib.blake2b(",".join(str(int(part)) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return 64 random bits per token [B]: output ``positions[b]`` of a SplitMix64 generator with seed ``seeds[b]``."""
    key = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    return (key ^ (key >> np.uint64(31))).view(np.int64)


def request_digest(request: Request) -> bytes:
    """Return a 16-byte digest of a request's problem, prompt and sampling.

    It tells requests with the same seed apart. It is the same on every machine and Python version.
    """
    sampling, prompt = request.sampling, request.prompt
    asked = (prompt.problem.id, float(sampling.temperature), float(sampling.top_p), int(sampling.max_response_tokens))
    text = repr(asked) + ("routed experts" if sampling.routed_experts else "")
    return hashlib.blake2b(text.encode() + prompt.token_ids.astype("<i4").tobytes(), digest_size=16).digest()


def plan_requests(
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int,
) -> dict[RequestKey, Request]:
    """Make ``group_size`` requests per prompt, group by group.

    The seed identifies a request within the rollout. The problem's id does not: a problem may occur twice.
    """
    return {
        (prompt_index, sample_index): Request(
            prompt=prompt,
            sample_index=sample_index,
            sampling=sampling,
            seed=request_seed(seed, prompt_index, sample_index),
        )
        for prompt_index, prompt in enumerate(prompts)
        for sample_index in range(group_size)
    }


def assemble_group(
    prompts: Sequence[Prompt],
    prompt_index: int,
    group_size: int,
    completions: Mapping[RequestKey, Completion],
    verdicts: Mapping[RequestKey, Verdict],
) -> Group | None:
    """Return a prompt's group, its responses in the order of ``sample_index``; None while a verdict is missing."""
    keys = [(prompt_index, sample_index) for sample_index in range(group_size)]
    if any(key not in verdicts for key in keys):
        return None
    return Group(prompts[prompt_index], tuple(completions[key] for key in keys), tuple(verdicts[key] for key in keys))


def dispatch(
    waiting: deque[tuple[RequestKey, Request]],
    budget: SamplingBudget,
    outstanding: Mapping[int, int],
    room: int,
    low: int,
) -> dict[int, list[tuple[RequestKey, Request]]]:
    """Take requests from the front of ``waiting`` and give each to the engine that has the fewest requests.

    A group's requests may go to several engines.

    Args:
        outstanding: engine -> the number of requests that the engine has.
        room: the most requests that one engine takes.
        low: an engine with fewer requests than this also gets requests beyond ``budget.allowed`` that may still be
            part of the result. They cost the engine little, and no engine is idle while there may be work.

    Returns:
        Engine -> the requests to send to the engine now.
    """
    load, batches, allowed = dict(outstanding), defaultdict[int, list[tuple[RequestKey, Request]]](list), budget.allowed
    while waiting and load:
        (prompt_index, _), _ = waiting[0]
        index = min(load, key=load.__getitem__)
        if not budget.wants(prompt_index) or load[index] >= (room if prompt_index < allowed else low):
            break
        batches[index].append(waiting.popleft())
        load[index] += 1
    return batches
