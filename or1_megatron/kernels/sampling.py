"""Samples a token from each row of logits; also returns the token's log-prob and the whole distribution's entropy.

The token is the argmax of scaled logit plus Gumbel noise. The noise is a function of the row's key and the vocabulary
index. The key is made from the request's seed and the token's position in the response. There is no generator and no
state, so a token depends neither on the batch nor on earlier draws. On a GPU, ``sampling_triton`` does the work.

Shapes: B rows of logits (one per request), V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from or1_megatron.kernels.tiled_head import with_triton

_PART_NUMBERS = 1 << 17  # logits worked on at once, so that they stay in cache
_OF_INDEX, _FIRST, _SECOND = 0x9E3779B1 - (1 << 32), 0x7FEB352D, 0x846CA68B - (1 << 32)  # 32 bits, as signed numbers


class Sampled(NamedTuple):
    """The token sampled from each row of logits. Log-prob and entropy are NaN if a row has NaN, +inf, or only -inf."""

    tokens: Tensor  # [B] int64
    log_probs: Tensor  # [B] fp32, temperature applied, of the whole distribution
    entropies: Tensor  # [B] fp32, nats, of the same distribution


def sample(logits: Tensor, keys: Tensor, temperatures: Tensor, floors: Tensor | None = None) -> Sampled:
    """Sample a token from each row of logits.

    Args:
        logits: [B, V], any floating type; the numbers of a row are adjacent in memory.
        keys: [B] int64, random bits made from (the request's seed, the token's position in the response).
        temperatures: [B] fp32; 0 takes the most likely token, with log-prob and entropy at temperature 1.
        floors: [B] lowest logit that may be sampled (top-p: the nucleus's lowest); None: every token may be sampled.
    """
    greedy = temperatures == 0
    scales = (temperatures + greedy).reciprocal_()
    if with_triton("auto", logits.device):
        from or1_megatron.kernels.sampling_triton import sample_rows

        floors = torch.full_like(scales, -torch.inf) if floors is None else floors.float()
        return Sampled(*sample_rows(logits, keys, temperatures, scales, floors))
    rows, parts = max(1, _PART_NUMBERS // logits.shape[1]), []
    for part in (slice(first, first + rows) for first in range(0, len(logits), rows)):
        given = (logits[part], keys[part], greedy[part], scales[part])
        parts.append(_sample(*given, None if floors is None else floors[part]))
    return parts[0] if len(parts) == 1 else Sampled(*map(torch.cat, zip(*parts, strict=True)))


def _sample(logits: Tensor, keys: Tensor, greedy: Tensor, scales: Tensor, floors: Tensor | None) -> Sampled:
    scaled = logits * scales[:, None]
    scaled.sub_(scaled.amax(dim=1, keepdim=True)).clamp_(min=-1e4)  # 0 times a finite number is 0, as the entropy needs
    weights = scaled.exp()
    # With exponential variables E, argmax(w / E) is argmax(log w - log E), and -log E are Gumbel variables.
    scores = _exponentials(keys, logits.shape[1]).masked_fill_(greedy[:, None], -1.0)
    torch.div(weights, scores, out=scores)
    if floors is not None:
        scores.masked_fill_(logits < floors[:, None], torch.inf)
    tokens = scores.argmin(dim=1)
    totals = weights.sum(dim=1)
    logs = totals.log()
    log_probs = scaled.gather(1, tokens[:, None])[:, 0].sub_(logs)
    return Sampled(tokens, log_probs, logs - weights.mul_(scaled).sum(dim=1).div_(totals))


def _exponentials(keys: Tensor, vocabulary: int) -> Tensor:
    """Return exponential random variables [B, V], negated."""
    low, high = keys[:, None].view(torch.int32).split(1, dim=1)
    bits = (_index_bits(vocabulary, keys.device) ^ low).mul_(_FIRST)
    scratch = torch.empty_like(bits)
    bits.bitwise_xor_(_shifted(bits, 15, scratch)).bitwise_xor_(high).mul_(_SECOND)
    bits.bitwise_xor_(_shifted(bits, 16, scratch)).bitwise_and_(0x7FFFFFFF)
    # The smallest variables decide, so they need a fine resolution: variables near 2**-32 come from the smallest bits.
    return torch.add(bits, 0.5).mul_(-(2.0**-31)).log1p_()


@lru_cache(2)
def _index_bits(vocabulary: int, device: torch.device) -> Tensor:
    bits = torch.arange(vocabulary, dtype=torch.int32, device=device) * _OF_INDEX
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, shift: int, out: Tensor | None = None) -> Tensor:
    """Return ``bits >> shift``, where ``bits`` are read as unsigned numbers."""
    return torch.bitwise_right_shift(bits, shift, out=out).bitwise_and_((1 << (32 - shift)) - 1)
