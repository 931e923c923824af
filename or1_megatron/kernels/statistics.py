"""Four statistics of a token's logits, which are merged over tiles of the vocabulary and over tensor-parallel ranks.

Shapes: T tokens, t of them in one tile. Statistics are [4, t] fp32, per token over the logits z seen so far:
    PEAK    max z
    TOTAL   sum exp(z - peak)
    MOMENT  sum exp(z - peak) (z - peak)
    TARGET  z of the target token, 0 where another rank or tile holds the target token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

PEAK, TOTAL, MOMENT, TARGET = range(4)


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the output weight (vocabulary ids) this tensor-parallel rank holds."""

    first_row: int
    true_vocab_size: int
    """Rows from this vocabulary id on are padding and get probability 0."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group that shares the vocabulary; None if this rank holds the whole vocabulary."""

    def real_rows(self, rows: int) -> int:
        """Return how many of this rank's first ``rows`` rows are not padding (padding comes last)."""
        return min(max(self.true_vocab_size - self.first_row, 0), rows)

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def merge(parts: Tensor) -> Tensor:
    """Merge the statistics ``parts`` [n, 4, t] of n parts of the logits into [4, t]; n may be 0.

    With d = peak_i - peak: total = sum_i e^d total_i, moment = sum_i e^d (moment_i + d total_i).
    """
    merged = parts.new_zeros(parts.shape[1:])
    if len(parts) == 0:
        # Not -inf: on a rank that holds only padding, d * total would be inf * 0.
        merged[PEAK] = torch.finfo(parts.dtype).min
        return merged
    torch.amax(parts[:, PEAK], dim=0, out=merged[PEAK])
    down = parts[:, PEAK] - merged[PEAK]
    keep = down.exp()
    torch.sum(keep * parts[:, TOTAL], dim=0, out=merged[TOTAL])
    torch.sum(keep * (parts[:, MOMENT] + down * parts[:, TOTAL]), dim=0, out=merged[MOMENT])
    torch.sum(parts[:, TARGET], dim=0, out=merged[TARGET])
    return merged


def merge_over_ranks(statistics: Tensor, shard: VocabularyShard) -> Tensor:
    """Return the statistics [4, t] over the whole vocabulary, bit-equal on all ranks, by one small all-gather."""
    if shard.group is None or statistics.numel() == 0:
        return statistics
    gathered = statistics.new_empty(shard.ranks * len(statistics), statistics.shape[1])
    dist.all_gather_single(gathered, statistics.contiguous(), group=shard.group)
    return merge(gathered.view(shard.ranks, *statistics.shape))


@dataclass(frozen=True)
class Scores:
    """The head's results per token, and the numbers from which the head's gradient is computed; all [t] fp32."""

    log_probs: Tensor
    entropies: Tensor
    peaks: Tensor
    log_totals: Tensor
    """log sum exp z = peak + log_total. Both terms are kept, because their sum loses digits if logits are large: with
    logits near -10^4 the sum would be off by 5e-4, and every probability by as much."""

    @classmethod
    def of(cls, statistics: Tensor) -> Scores:
        """Compute the scores from statistics [4, t] over the whole vocabulary."""
        log_totals = statistics[TOTAL].log()
        return cls(
            log_probs=(statistics[TARGET] - statistics[PEAK]) - log_totals,
            entropies=log_totals - statistics[MOMENT] / statistics[TOTAL],
            peaks=statistics[PEAK],
            log_totals=log_totals,
        )

    def __getitem__(self, part: slice) -> Scores:
        return Scores(self.log_probs[part], self.entropies[part], self.peaks[part], self.log_totals[part])
