"""Loss aggregation: token weights that turn the mean over tokens into the mean that ``loss.aggregation`` names."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from or1_megatron.types import Aggregation, Sample

GPUS: Final = 32
"""Number of GPUs over which ``released-code`` spreads a mini-batch: 32 in every run, as in the paper's 7B runs."""
_PROMPT_AND_MARGIN: Final = 2048 + 1000
"""Tokens that the released scripts add to the longest response to get a micro-batch's token budget."""


def weigh(samples: Sequence[Sample], aggregation: Aggregation, max_response_tokens: int) -> list[Sample]:
    """Return a mini-batch's samples with token weights whose mean over its T_k counted tokens is 1.

    ``response_mean`` averages each response's tokens, then the responses (GRPO, arXiv 2402.03300, eq. 3). Sample i has
    n_i counted tokens, and R samples have at least one counted token, so the weight is T_k / (R n_i).

    ``released-code`` averages each micro-batch's tokens, then the micro-batches, each weighted by its number of
    samples. With R_m samples and T_m counted tokens in a micro-batch, the weight is R_m T_k / (R T_m). Micro-batches
    are cut as the released code cuts them (``released_cut``). They are not the packed rows that a rank computes at
    once, so no weight depends on the parallel layout.

    Worked example: responses of 1 and 3 tokens have T_k = 4. ``response_mean`` gives the weights 4 / (2 * 1) = 2 and
    4 / (2 * 3) = 2/3, with the mean (2 + 3 * 2/3) / 4 = 1. With ``released-code`` both responses have the
    weight 2 * 4 / (2 * 4) = 1 if they share a micro-batch, else 2 and 2/3.
    """
    if aggregation == "token_mean":
        return list(samples)
    tokens = np.array([sample.loss_mask.sum() for sample in samples], dtype=np.float64)
    responses = (tokens > 0).astype(np.float64)
    shares = responses / np.maximum(tokens, 1.0)
    if aggregation == "released-code":
        lengths = np.array([sample.prompt_ids.size + sample.response_ids.size for sample in samples])
        for part in released_cut(lengths, max_response_tokens + _PROMPT_AND_MARGIN):
            shares[part] = responses[part].sum() / max(tokens[part].sum(), 1.0)
    weights = shares * tokens.sum() / max(responses.sum(), 1.0)
    return [replace(sample, weight=float(weight)) for sample, weight in zip(samples, weights, strict=True)]


def released_cut(lengths: NDArray[np.int64], budget_tokens: int, gpus: int = GPUS) -> list[list[int]]:
    """Cut a mini-batch of n samples, ``lengths`` [n] tokens each, into micro-batches as the released code does.

    Each GPU gets the same number of samples (some GPUs get one less) and nearly the same number of tokens. Each GPU
    cuts its samples into micro-batches with nearly equal numbers of tokens. All GPUs make equally many micro-batches:
    as many as the GPU with the most tokens needs under ``budget_tokens``. (The released code also drops up to ``gpus``
    - 1 samples to make their number divisible.)
    """
    shares = [sorted(share) for share in balanced(lengths, min(gpus, len(lengths)), same_count=True)]
    count = max(-(-int(lengths[share].sum()) // budget_tokens) for share in shares)
    cut = [[[share[i] for i in part] for part in balanced(lengths[share], count)] for share in shares]
    return [part for of_gpu in cut for part in of_gpu if part]


_Part = tuple[int, int, list[int]]
"""A part's (sum, number of members, members), all negated, so that sorting puts the largest part first."""


def balanced(sizes: NDArray[np.int64], parts: int, same_count: bool = False) -> list[list[int]]:
    """Split the indices of ``sizes`` into ``parts`` of nearly equal sums, by the largest differencing method.

    Karmarkar and Karp 1982: each index begins as a partition in which one part holds the index and the others are
    empty. Each step merges the two partitions whose sums are spread most widely. It joins the largest part of one with
    the smallest part of the other, the next largest with the next smallest, and so on. The last partition is the
    result. With ``same_count`` a partition begins with ``parts`` indices of similar size, one in each part.

    Worked example: 8, 7, 6, 5, 4 give two parts with sums 14 and 16.
    """
    step = parts if same_count else 1
    padding = -len(sizes) % step  # nothing, of size 0
    order = [-1] * padding + np.argsort(sizes, kind="stable").tolist()
    heap: list[tuple[int, _Part, list[_Part]]] = []

    def push(partition: list[_Part]) -> None:
        partition.sort()
        heapq.heappush(heap, (partition[0][0] - partition[-1][0], partition[0], partition))

    for start in range(0, len(order), step):
        made: list[_Part] = [(0, 0, []) if i < 0 else (-int(sizes[i]), -1, [-i]) for i in order[start : start + step]]
        push(made + [(0, 0, [])] * (parts - len(made)))
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push([(a + b, n + m, of_a + of_b) for (a, n, of_a), (b, m, of_b) in zip(first, reversed(second), strict=True)])
    return [[-i for i in members] for _, _, members in heap[0][2]]
