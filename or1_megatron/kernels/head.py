"""The policy's head: log-prob and entropy of target tokens straight from hidden states, tile by tile.

The matrix [tokens, vocabulary] never exists whole: tokens are taken in tiles, statistics are fp32, and the backward
pass computes a tile's logits again. Over a tensor-parallel group the vocabulary is cut; the tile's statistics are
merged with one all-reduce for the maximum and one for the sums.

Shapes: T tokens, t tokens of one tile, H hidden, V/tp rows of the output weight on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the vocabulary this rank's output weight holds."""

    first_row: int
    true_vocab_size: int
    """Rows at or beyond it are padding: they get probability 0."""
    group: dist.ProcessGroup | None = None
    """Ranks that share the vocabulary; None when this rank holds all of it."""

    def reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def _tile_logits(hidden: Tensor, weight: Tensor, temperature: float, shard: VocabularyShard) -> Tensor:
    """[t, V/tp] fp32 logits divided by the temperature, padding rows at -inf."""
    logits = torch.matmul(hidden, weight.t()).float().div_(temperature)
    real = min(max(shard.true_vocab_size - shard.first_row, 0), weight.shape[0])
    if real < weight.shape[0]:
        logits[:, real:] = float("-inf")
    return logits


def _local_targets(targets: Tensor, rows: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Each target's row on this rank (0 where it is elsewhere) and whether it is here; both [t]."""
    local = targets - shard.first_row
    here = (local >= 0) & (local < rows)
    return torch.where(here, local, 0), here


class _LogProbEntropy(torch.autograd.Function):
    """Forward keeps log-sum-exp and entropy per token; backward recomputes logits.

    d log p(target) / dz = onehot - p;  d H / dz = -p (log p + H); both over the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        shard: VocabularyShard,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        log_probs = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        entropies, log_sums = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, tokens, tile):
            part = slice(start, min(start + tile, tokens))
            logits = _tile_logits(hidden[part], weight, temperature, shard)
            peak = shard.reduce(logits.amax(dim=1), dist.ReduceOp.MAX)
            local, here = _local_targets(targets[part], weight.shape[0], shard)
            target = torch.where(here, logits.gather(1, local[:, None])[:, 0] - peak, 0.0)
            shifted = logits.sub_(peak[:, None])
            weights = shifted.exp()
            moment = torch.where(weights > 0, weights * shifted, 0.0).sum(dim=1)
            sums = shard.reduce(torch.stack((weights.sum(dim=1), moment, target)), dist.ReduceOp.SUM)
            log_total = sums[0].log()
            log_probs[part] = sums[2] - log_total
            entropies[part] = log_total - sums[1] / sums[0]
            log_sums[part] = peak + log_total
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropies)
        ctx.temperature, ctx.shard, ctx.tile = temperature, shard, tile
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        hidden, weight, targets, log_sums, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropies = grads
        shard, tile = ctx.shard, ctx.tile
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], tile):
            part = slice(start, min(start + tile, hidden.shape[0]))
            log_p = _tile_logits(hidden[part], weight, ctx.temperature, shard).sub_(log_sums[part][:, None])
            p = log_p.exp()
            spread = torch.where(p > 0, log_p, 0.0).add_(entropies[part][:, None])
            grad = p.mul(-grad_log_probs[part][:, None]) - p.mul_(spread).mul_(grad_entropies[part][:, None])
            local, here = _local_targets(targets[part], weight.shape[0], shard)
            grad.scatter_add_(1, local[:, None], torch.where(here, grad_log_probs[part], 0.0)[:, None])
            grad = grad.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[part] = torch.matmul(grad, weight)
            grad_weight += torch.matmul(grad.t(), hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def log_probs_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabularyShard,
    tile: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its whole distribution, at a temperature.

    Args:
        hidden: [T, H], the same on all ranks of the group. Its gradient is this rank's share: the caller sums it over
            the group.
        weight: [V/tp, H].
        targets: [T] int64 vocabulary ids.
        temperature: logits are divided by it.
        shard: which rows ``weight`` holds.
        tile: tokens per tile; the workspace is a few fp32 tiles of [tile, V/tp].

    Returns:
        (log_probs, entropies), both [T] fp32, equal on all ranks of the group.
    """
    log_probs, entropies = _LogProbEntropy.apply(hidden, weight, targets, temperature, shard, tile)
    return log_probs, entropies


def reference_log_probs_and_entropies(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same by plain autograd on the whole matrix of logits, in the dtype given (float64 for an oracle)."""
    log_p = torch.log_softmax(torch.matmul(hidden, weight.t()) / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)
