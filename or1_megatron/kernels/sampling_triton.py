"""The token sampler in Triton: each program reads one row of logits once. ``sampling`` documents the results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Number of logits per program and iteration: 8 per thread."""
_WARPS = 8


@triton.jit
def _sample_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, keys, temperatures, scales, floors, tokens, log_probs, entropies, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    of_row = logits + row * row_stride
    key = tl.load(keys + row)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    is_random = tl.load(temperatures + row) > 0
    scale = tl.load(scales + row)
    floor = tl.load(floors + row)
    peak = -3.4028234663852886e38  # not -inf, because -inf - -inf is NaN
    total = 0.0
    moment = 0.0
    best = float("-inf")
    token = 0
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logit = tl.load(of_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
        z = logit * scale
        bits = at.to(tl.uint32) * 0x9E3779B1
        bits = (bits ^ (bits >> 16) ^ low) * 0x7FEB352D
        bits = (bits ^ (bits >> 15) ^ high) * 0x846CA68B
        bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
        u = (bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
        # -log(1 - u), exact also for small u: the second factor undoes the rounding of 1 - u.
        rest = 1.0 - u
        exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))
        score = tl.where(is_random, z - tl.log(exponential), z)
        score = tl.where((at < width) & (logit >= floor), score, float("-inf"))
        block_best, index = tl.max(score, axis=0, return_indices=True)
        token = tl.where(block_best > best, first + index, token)
        best = tl.maximum(best, block_best)
        new_peak = tl.maximum(peak, tl.max(z, axis=0))
        down = peak - new_peak
        keep = tl.exp(down)
        shifted = z - new_peak
        shifted = tl.where(shifted < -1e4, -1e4, shifted)  # 0 times a finite number is 0; NaN stays
        weights = tl.exp(shifted)
        moment = keep * (moment + down * total) + tl.sum(weights * shifted, axis=0)
        total = keep * total + tl.sum(weights, axis=0)
        peak = new_peak
    log_total = tl.log(total)
    drawn = tl.load(of_row + token).to(tl.float32) * scale
    tl.store(tokens + row, token)
    tl.store(log_probs + row, drawn - peak - log_total)
    tl.store(entropies + row, log_total - moment / total)


def sample_rows(
    logits: Tensor, keys: Tensor, temperatures: Tensor, scales: Tensor, floors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, log-probs, entropies) [B], as ``sampling.sample`` does. ``scales`` [B] multiply the logits."""
    found = torch.empty_like(keys), torch.empty_like(scales), torch.empty_like(scales)
    if len(keys):
        given = (logits, logits.stride(0), keys, temperatures, scales, floors, *found, logits.shape[1])
        _sample_kernel[(len(keys),)](*given, BLOCK=_BLOCK, num_warps=_WARPS)
    return found
