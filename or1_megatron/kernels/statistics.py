"""What is kept of a token's logits: four numbers, which merge over tiles of the vocabulary and over ranks alike.

Shapes: T tokens, t of them in one tile. Statistics are [4, t] fp32, per token over the logits z seen so far:
    PEAK    max z
    TOTAL   sum exp(z - peak)
    MOMENT  sum exp(z - peak) (z - peak)
    TARGET  z of the target token, 0 where another rank or tile holds it
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

PEAK, TOTAL, MOMENT, TARGET = range(4)


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the vocabulary this rank's output weight holds."""

    first_row: int
    true_vocab_size: int
    """Rows at or beyond it are padding: they get probability 0."""
    group: dist.ProcessGroup | None = None
    """Ranks that share the vocabulary; None when this rank holds all of it."""

    def real_rows(self, rows: int) -> int:
        """How many of this rank's ``rows`` are no padding; they come first."""
        return min(max(self.true_vocab_size - self.first_row, 0), rows)

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def merge(parts: Tensor) -> Tensor:
    """[4, t] over the logits that the n ``parts`` [n, 4, t] have seen; n may be 0.

    With d = peak_i - peak: total = sum_i e^d total_i, moment = sum_i e^d (moment_i + d total_i).
    """
    merged = parts.new_zeros(parts.shape[1:])
    if len(parts) == 0:
        # Not -inf: where a rank holds padding alone, d * total would then be inf * 0.
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
    """[4, t] over the whole vocabulary, the same bits on every rank of the group. One small all-gather."""
    if shard.group is None or statistics.numel() == 0:
        return statistics
    gathered = statistics.new_empty(shard.ranks * len(statistics), statistics.shape[1])
    dist.all_gather_single(gathered, statistics.contiguous(), group=shard.group)
    return merge(gathered.view(shard.ranks, *statistics.shape))


@dataclass(frozen=True)
class Scores:
    """What the head says of each token, and what its gradient needs; all [t] fp32."""

    log_probs: Tensor
    entropies: Tensor
    peaks: Tensor
    log_totals: Tensor
    """log sum exp z is peak + log_total. Apart, since the sum would lose digits where logits are large: at -10^4 it is
    off by 5e-4, and so would every probability be."""

    @classmethod
    def of(cls, statistics: Tensor) -> Scores:
        """Of statistics [4, t] over the whole vocabulary."""
        log_totals = statistics[TOTAL].log()
        return cls(
            log_probs=(statistics[TARGET] - statistics[PEAK]) - log_totals,
            entropies=log_totals - statistics[MOMENT] / statistics[TOTAL],
            peaks=statistics[PEAK],
            log_totals=log_totals,
        )

    def __getitem__(self, part: slice) -> Scores:
        return Scores(self.log_probs[part], self.entropies[part], self.peaks[part], self.log_totals[part])
