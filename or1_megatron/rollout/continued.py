"""Responses that are continued: an engine reads the tokens that were sampled before, and samples the rest.

A request whose response was given up may be asked again with its tokens (``Request.before``), later and under newer
weights. The engine takes them as part of the prompt, so its keys and values of them are the new weights'; their
log-probs and versions stay those of the weights that sampled them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from or1_megatron.rollout.request_plan import request_seed
from or1_megatron.types import Float32Array, Int32Array, Request, VersionSpan


def tokens_before(request: Request) -> int:
    """Return how many tokens the response has already.

    Raises:
        ValueError: as many as it may have at most.
    """
    before = 0 if request.before is None else len(request.before.token_ids)
    if before >= request.sampling.max_response_tokens:
        raise ValueError(
            f"sample {request.sample_index} of problem {request.prompt.problem.id} is continued after {before} tokens; "
            f"expected fewer than max_response_tokens = {request.sampling.max_response_tokens}"
        )
    return before


def read_tokens(request: Request) -> Int32Array:
    """Return what the engine reads before it samples: the prompt, and the response's tokens so far."""
    prompt = request.prompt.token_ids
    return prompt if request.before is None else np.concatenate((prompt, request.before.token_ids))


def generator_seed(request: Request) -> int:
    """Return the seed of the random numbers that sample a request's tokens.

    A continued response gets others than it began with: the old tokens depend on those, and new ones drawn with them
    again would not follow the model's distribution.
    """
    before = tokens_before(request)
    return request_seed(request.seed, before) if before else request.seed


def joined(sampled: Any, request: Request) -> tuple[Int32Array, Float32Array, tuple[VersionSpan, ...]]:
    """Return tokens, log-probs and versions of the whole response; ``sampled``: vLLM's CompletionOutput of the rest."""
    token_ids = np.array(sampled.token_ids, dtype=np.int32)
    log_probs = np.array(sampled.logprobs.logprobs, dtype=np.float32)
    first, before = tokens_before(request), request.before
    versions = tuple(VersionSpan(int(span.version), first + span.start) for span in sampled.weight_versions)
    if before is None:
        return token_ids, log_probs, versions
    ids = np.concatenate((before.token_ids, token_ids))
    return ids, np.concatenate((before.log_probs, log_probs)), before.versions + versions
