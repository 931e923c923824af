"""The fused head's elementwise work (epilogue) in plain torch, for the CPU and for a GPU without Triton.

The work is done in place, on as many rows of logits at a time as the scratch holds, so that the rows stay in cache.

Shapes: t tokens, v rows of the output weight; logits are [t, v] fp32, already divided by the temperature.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from or1_megatron.kernels.statistics import MOMENT, PEAK, TARGET, TOTAL, Scores


def narrow_view(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the memory of ``logits`` as [t, v] in ``dtype``; a 2-byte dtype uses the first half of each row."""
    return logits if dtype == logits.dtype else logits.view(dtype)[:, : logits.shape[1]]


class TorchEpilogue:
    """Computes statistics and gradient of a tile of logits in plain torch."""

    def __init__(self, scratch: Tensor) -> None:
        """``scratch``: a flat fp32 buffer of at least one row of logits."""
        self._scratch = scratch

    def statistics(self, logits: Tensor, columns: Tensor, out: Tensor) -> Tensor | None:
        """Write the tile's statistics to ``out`` [4, t].

        Args:
            columns: [t] the target's column in this tile; outside 0 ... v - 1 if the target is in another tile.

        Returns:
            For each token the number that was subtracted, in place, from the token's logits; [t].
        """
        for part, work in self._parts(logits):
            z, peak = logits[part], out[PEAK, part]
            torch.amax(z, dim=1, out=peak)
            out[TARGET, part] = _pick(z, columns[part])
            z.sub_(peak[:, None])
            weights = torch.exp(z, out=work)
            torch.sum(weights, dim=1, out=out[TOTAL, part])
            # exp() of a very low logit is 0; 0 times a finite number is 0, as the moment needs.
            torch.sum(weights.mul_(z), dim=1, out=out[MOMENT, part])
        return out[PEAK]

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
        """Replace the logits, in place, by d loss / d logits [t, v] in ``dtype``, which is

            g (onehot - p) - h p (log p + entropy)

        The work is in fp32 until the end: rounding p to bf16 before the subtraction would lose 1 - p if p is near 1.

        Args:
            offset: the result of ``statistics``; None if the logits were computed again.
            of_log_probs: g = d loss / d log-prob, [t].
            of_entropies: h = d loss / d entropy, [t]; None if the loss does not depend on the entropies.
        """
        gradient = narrow_view(logits, dtype)
        shift = (scores.peaks if offset is None else scores.peaks - offset)[:, None]
        # p = e / total with e = exp(z - peak). Dividing g and h by total, one number per token, saves a pass.
        totals = scores.log_totals.exp()[:, None]
        bias, slope = -of_log_probs[:, None] / totals, None
        if of_entropies is not None:
            slope = -of_entropies[:, None] / totals
            bias = bias + slope * (scores.entropies - scores.log_totals)[:, None]
        if offset is not None:
            # The logits are at most 0 already: the rest of the shift goes into the factors, which saves a pass.
            rest = (-shift).exp()
            bias = bias * rest if slope is None else (bias - slope * shift) * rest
            slope = None if slope is None else slope * rest
        for part, work in self._parts(logits):
            z = logits[part] if offset is not None else logits[part].sub_(shift[part])
            if slope is None:
                z.exp_().mul_(bias[part])
            else:
                e = torch.exp(z, out=work)
                z.mul_(slope[part]).add_(bias[part]).mul_(e)
            _add(z, columns[part], of_log_probs[part])
            if gradient is not logits:
                # Through the scratch, because source and destination overlap.
                gradient[part] = narrow_view(work, dtype).copy_(z)
        return gradient

    def _parts(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of rows that fits into the scratch, the scratch in the slice's shape)."""
        tokens, columns = logits.shape
        step = self._scratch.numel() // columns
        for start in range(0, tokens, step):
            part = slice(start, min(start + step, tokens))
            yield part, self._scratch[: (part.stop - start) * columns].view(-1, columns)


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    """Return, for each row, the logit at the row's column, or 0 if the column is outside the tile; [t]."""
    here = (columns >= 0) & (columns < logits.shape[1])
    return torch.where(here, logits.gather(1, torch.where(here, columns, 0)[:, None])[:, 0], 0.0)


def _add(logits: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add ``values`` [t] to the logits, one per row at the row's column, unless the column is outside the tile."""
    here = (columns >= 0) & (columns < logits.shape[1])
    logits.scatter_add_(1, torch.where(here, columns, 0)[:, None], torch.where(here, values, 0.0)[:, None])
