"""Speculation: vLLM drafts a response's next tokens from text that it has seen, and one pass of the model checks them.

What is sampled does not depend on the drafts. ``DraftSampler`` draws each token as it would be drawn without them, from
the model's distribution and with the request's next random number, and keeps what it has drawn up to the first token
that is not the drafted one. vLLM's own rejection sampler has the same distribution on paper, but its draws
depend on the drafts. In vLLM 0.32.0 it also reports log-probs after top-p, omits those that ``score_prompts`` asks for,
and on CPU reads uninitialised temperatures (``expand_kernel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

_NO_TOKEN = -1  # vLLM leaves these out of a request's tokens


class DraftSampler(torch.nn.Module):
    """Takes the place of vLLM's rejection sampler, for drafts that are one certain token each.

    A token is drawn only once the drafts before it have been drawn, too, so every request's generator stands where it
    would stand without speculation. Requests with penalties, bad words or other logits processors do not occur: vLLM
    finds their state by a request's place in the whole batch.
    """

    def __init__(self, sampler: torch.nn.Module) -> None:
        """``sampler``: vLLM's, which samples one token of each request."""
        super().__init__()
        self.sampler = sampler

    def forward(self, metadata: Any, draft_probs: None, logits: torch.Tensor, sampling: Any) -> Any:
        """Return vLLM's SamplerOutput: token ids [B, P], log-probs [B * P, ...]; P is 1 + the most drafts of a request.

        Args:
            metadata: vLLM's SpecDecodeMetadata, with n_i drafts of request i.
            logits: [sum of (n_i + 1), V], the requests one after another.
            sampling: vLLM's SamplingMetadata of the B requests.
        """
        counts: list[int] = metadata.num_draft_tokens
        drafts: list[int] = metadata.draft_token_ids.tolist()
        starts = [0, *accumulate(counts)]
        width = max(counts) + 1
        tokens = torch.full((len(counts), width), _NO_TOKEN, dtype=torch.int32, device=logits.device)
        log_probs: Any = None
        drawn: Any = None
        open_ = list(range(len(counts)))  # requests whose tokens so far are their drafts
        for place in range(width):
            requests = torch.tensor(open_, device=logits.device)
            rows = torch.tensor([starts[i] + i + place for i in open_], device=logits.device)
            drawn = self.sampler(logits[rows], _of(sampling, open_) if place else sampling)
            tokens[requests, place] = drawn.sampled_token_ids[:, 0]
            log_probs = _placed(drawn.logprobs_tensors, requests * width + place, len(counts) * width, log_probs)
            last = drawn.sampled_token_ids[:, 0].tolist()
            open_ = [
                i
                for i, token in zip(open_, last, strict=True)
                if place < counts[i] and token == drafts[starts[i] + place]
            ]
            if not open_:
                break
        return replace(drawn, sampled_token_ids=tokens, logprobs_tensors=log_probs)


def _of(sampling: Any, requests: Sequence[int]) -> Any:
    """Return the SamplingMetadata of some of its requests."""

    def rows(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[list(requests)]

    def by_place(values: dict[int, Any]) -> dict[int, Any]:
        return {place: values[request] for place, request in enumerate(requests) if request in values}

    return replace(
        sampling,
        temperature=rows(sampling.temperature),
        top_p=rows(sampling.top_p),
        top_k=rows(sampling.top_k),
        generators=by_place(sampling.generators),
        logprob_token_ids=by_place(sampling.logprob_token_ids or {}),
    )


def _placed(part: Any, rows: torch.Tensor, total: int, whole: Any) -> Any:
    """Write vLLM's LogprobsTensors ``part`` into these rows of ``whole``, which is made where it is None."""
    if part is None:
        return whole
    columns = part.logprobs.shape[1]
    if whole is None:
        whole = part._replace(
            logprob_token_ids=part.logprob_token_ids.new_zeros(total, columns),
            logprobs=part.logprobs.new_full((total, columns), -torch.inf),
            selected_token_ranks=part.selected_token_ranks.new_zeros(total),
        )
    whole.logprob_token_ids[rows, :columns] = part.logprob_token_ids
    whole.logprobs[rows, :columns] = part.logprobs
    whole.selected_token_ranks[rows] = part.selected_token_ranks
    return whole
