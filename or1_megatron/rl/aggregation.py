"""Token weights that turn the sum of a mini-batch's token losses, divided by T_k, into each ``loss.aggregation``."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from or1_megatron.types import Aggregation, Sample

GPUS: Final = 32
"""GPUs over which the released rule spreads a mini-batch, in any run: as many as in the paper's 7B runs."""
_BESIDE_RESPONSE: Final = 2048 + 1000
"""The released scripts' tokens per micro-batch besides T: the longest prompt and a margin."""


def weigh(samples: Sequence[Sample], aggregation: Aggregation, max_response_tokens: int) -> list[Sample]:
    """Return a mini-batch's samples with token weights whose mean over its T_k tokens is 1.

    ``response_mean`` is the mean over responses of their token means (GRPO, arXiv 2402.03300, eq. 3): with n_i counted
    tokens in sample i, and R samples that have any, the weight is T_k / (R n_i). ``released-code``: the mean of the
    micro-batches' token means weighted by their numbers of samples: R_m T_k / (R T_m) with R_m samples and T_m counted
    tokens in the micro-batch. The micro-batches are the released code's (``released_cut``, T =
    ``max_response_tokens``), not the rows that a rank computes at once, so no weight depends on the layout.

    Worked example: responses of 1 and 3 tokens: T_k = 4, response weights 4 / (2 * 1) = 2 and 4 / (2 * 3) = 2/3; their
    mean over the four tokens, (2 + 3 * 2/3) / 4, is 1. Released rule: both in one micro-batch, 2 * 4 / (2 * 4) = 1; in
    two, 2 and 2/3.
    """
    if aggregation == "token_mean":
        return list(samples)
    tokens = np.array([sample.loss_mask.sum() for sample in samples], dtype=np.float64)
    responses = (tokens > 0).astype(np.float64)
    shares = responses / np.maximum(tokens, 1.0)
    if aggregation == "released-code":
        lengths = np.array([sample.prompt_ids.size + sample.response_ids.size for sample in samples])
        for part in released_cut(lengths, max_response_tokens + _BESIDE_RESPONSE):
            shares[part] = responses[part].sum() / max(tokens[part].sum(), 1.0)
    weights = shares * tokens.sum() / max(responses.sum(), 1.0)
    return [replace(sample, weight=float(weight)) for sample, weight in zip(samples, weights, strict=True)]


def released_cut(lengths: NDArray[np.int64], budget_tokens: int, gpus: int = GPUS) -> list[list[int]]:
    """Cut a mini-batch of n samples, ``lengths`` [n] tokens each, into micro-batches as the released code does.

    Each GPU gets the same number of samples and nearly the same number of tokens. Then each GPU cuts its samples into
    equally many micro-batches, balanced by tokens only: as many as the fullest GPU's tokens need under the budget.
    (The released code drops up to ``gpus`` - 1 samples so that their number divides; here some GPUs have one less.)
    """
    shares = [sorted(share) for share in balanced(lengths, min(gpus, len(lengths)), same_count=True)]
    count = max(-(-int(lengths[share].sum()) // budget_tokens) for share in shares)
    cut = [[[share[i] for i in part] for part in balanced(lengths[share], count)] for share in shares]
    return [part for of_gpu in cut for part in of_gpu if part]


_Part = tuple[int, int, list[int]]
"""A part's sum, number of members and members, all negated, so that the largest comes first, ties included."""


def balanced(sizes: NDArray[np.int64], parts: int, same_count: bool = False) -> list[list[int]]:
    """Split the indices of ``sizes`` into ``parts`` of nearly equal sums, by the largest differencing method.

    Karmarkar and Karp 1982: begin with a partition per index: one part holds it, the others are empty. Until one
    partition is left, merge the two whose largest and smallest sums differ most, the largest part of one with the
    smallest of the other. ``same_count``: begin with a partition per ``parts`` indices of similar size, one per part.

    Worked example: 8, 7, 6, 5, 4 in two parts: 14 and 16.
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
