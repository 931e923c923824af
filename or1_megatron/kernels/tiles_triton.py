"""The fused head's elementwise work (epilogue) in Triton: a kernel for a tile's statistics, one for the gradient.

Each program walks along one token's row of logits. ``TorchEpilogue`` documents what both epilogues compute.

Shapes: t tokens, v rows of the output weight; logits are [t, v] fp32, already divided by the temperature.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from or1_megatron.kernels.statistics import Scores
from or1_megatron.kernels.tiles_torch import narrow_view

_BLOCK = 4096
"""Number of logits per program and iteration: 16 per thread."""
_WARPS = 8


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, columns, out, statistic_stride, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    of_row = logits + row * row_stride
    column = tl.load(columns + row)
    # Not -inf, because -inf - -inf is NaN.
    lowest = -3.4028234663852886e38
    peak = lowest
    total = 0.0
    moment = 0.0
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.load(of_row + at, mask=at < width, other=lowest)
        new_peak = tl.maximum(peak, tl.max(z, axis=0))
        down = peak - new_peak
        keep = tl.exp(down)
        shifted = z - new_peak
        weights = tl.exp(shifted)
        moment = keep * (moment + down * total) + tl.sum(weights * shifted, axis=0)
        total = keep * total + tl.sum(weights, axis=0)
        peak = new_peak
    target = tl.load(of_row + column, mask=(column >= 0) & (column < width), other=0.0)
    tl.store(out + row, peak)
    tl.store(out + statistic_stride + row, total)
    tl.store(out + 2 * statistic_stride + row, moment)
    tl.store(out + 3 * statistic_stride + row, target)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    columns,
    peaks,
    log_totals,
    entropies,
    of_log_probs,
    of_entropies,
    gradient,
    gradient_stride,
    width,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of_row = logits + row * row_stride
    gradient_of_row = gradient + row * gradient_stride
    column = tl.load(columns + row)
    peak = tl.load(peaks + row)
    log_total = tl.load(log_totals + row)
    of_log_prob = tl.load(of_log_probs + row)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        log_p = tl.load(of_row + at, mask=at < width, other=peak) - peak - log_total
        factor = -of_log_prob
        if WITH_ENTROPY:
            of_entropy = tl.load(of_entropies + row)
            factor = factor - of_entropy * (log_p + tl.load(entropies + row))
        slope = tl.exp(log_p) * factor + tl.where(at == column, of_log_prob, 0.0)
        # A narrower gradient lies at the start of the same row: storing it may overwrite logits of this block and of
        # earlier blocks, never of later blocks. So all threads must load before any thread stores.
        tl.debug_barrier()
        tl.store(gradient_of_row + at, slope.to(gradient.dtype.element_ty), mask=at < width)


class TritonEpilogue:
    """Computes statistics and gradient of a tile of logits in Triton, without scratch."""

    def statistics(self, logits: Tensor, columns: Tensor, out: Tensor) -> None:
        """Write the tile's statistics to ``out`` [4, t], and leave the logits unchanged."""
        tokens, width = logits.shape
        if tokens:
            _launch(_statistics_kernel, tokens, logits, logits.stride(0), columns, out, out.stride(0), width)

    def gradient(
        self,
        logits: Tensor,
        columns: Tensor,
        offset: Tensor | None,
        scores: Scores,
        of_log_probs: Tensor,
        of_entropies: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Replace the logits, in place, by d loss / d logits [t, v] in ``dtype``; ``offset`` is not used."""
        tokens, width = logits.shape
        gradient = narrow_view(logits, dtype)
        if tokens:
            _launch(
                _gradient_kernel,
                tokens,
                logits,
                logits.stride(0),
                columns,
                scores.peaks.contiguous(),
                scores.log_totals.contiguous(),
                scores.entropies.contiguous(),
                of_log_probs.contiguous(),
                of_log_probs if of_entropies is None else of_entropies.contiguous(),
                gradient,
                gradient.stride(0),
                width,
                WITH_ENTROPY=of_entropies is not None,
            )
        return gradient


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    kernel[(programs,)](*arguments, **constants, BLOCK=_BLOCK, num_warps=_WARPS)
