"""Speculative decoding: vLLM drafts next tokens from text that it has seen, and one forward pass checks the drafts.

The sampled tokens do not depend on the drafts: each token is drawn as without drafts, with the random bits of its
position. vLLM's own rejection sampler has the same distribution in theory, but its draws depend on the drafts. In vLLM
0.32.0 it also omits log-probs for ``score_prompts``, and on CPU reads uninitialised temperatures (``expand_kernel``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

_NO_TOKEN = -1  # vLLM leaves these out of a request's tokens


def check_drafts(sampler: Any, metadata: Any, draft_probs: None, logits: torch.Tensor, sampling: Any) -> Any:
    """Draw tokens; this function replaces vLLM's rejection sampler.

    Keep each request's drawn tokens up to and including the first drawn token that differs from the drafted token.

    Args:
        sampler: a ``worker.SeededSampler``.
        metadata: vLLM's SpecDecodeMetadata, with n_i drafted tokens of request i.
        logits: [sum of (n_i + 1), V], one request after another.
        sampling: vLLM's SamplingMetadata of the B requests.

    Returns:
        vLLM's SamplerOutput: token ids [B, P], log-probs [B * P, ...], where P is 1 + max n_i.
    """
    counts = np.array(metadata.num_draft_tokens)
    requests = np.repeat(np.arange(len(counts)), counts + 1)
    ahead = np.arange(len(requests)) - (np.cumsum(counts + 1) - counts - 1)[requests]
    drawn = sampler.draw(logits, sampling, requests, ahead)
    tokens = drawn.sampled_token_ids.new_full((len(counts), int(counts.max()) + 1), _NO_TOKEN)
    drafts = tokens.clone()
    tokens[requests, ahead] = drawn.sampled_token_ids[:, 0]
    is_drafted = ahead < counts[requests]
    drafts[requests[is_drafted], ahead[is_drafted]] = metadata.draft_token_ids.to(tokens.dtype)
    right = (tokens == drafts)[:, :-1].cumprod(dim=1).bool()
    tokens[:, 1:].masked_fill_(~right, _NO_TOKEN)
    table, places = drawn.logprobs_tensors, torch.from_numpy(requests * tokens.shape[1] + ahead).to(logits.device)
    spread = (each.new_zeros(tokens.numel(), *each.shape[1:]).index_copy_(0, places, each) for each in table[:3])
    return replace(drawn, sampled_token_ids=tokens, logprobs_tensors=type(table)(*spread))
