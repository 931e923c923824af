"""The fused head: log-probs and entropies of target tokens, and their gradients, without all logits in memory.

Library GEMMs (MKL, cuBLAS) compute the fp32 logits [tokens, vocabulary] tile by tile. An epilogue in Triton or torch
works on each tile, and further GEMMs form the gradients. There are two modes; recompute needs the smaller workspace.
For N tokens, hidden size H and V rows of the output weight, the modes take:

    recompute   8NHV operations. The backward pass computes the logits again (``log_probs_and_entropies``).
    one_pass    6NHV operations. The forward pass forms the gradient while it has the logits (``one_pass_loss``).

A tensor-parallel group cuts the vocabulary, and a small all-gather merges the per-token statistics. The all-gather runs
once for all tokens in recompute, and once per tile of tokens in one_pass.

Shapes: T tokens, t tokens of one tile, H hidden, V/tp rows of the output weight on this rank, v rows of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from or1_megatron.kernels.head_weight_gradient import WeightGradient
from or1_megatron.kernels.plain_head import reference_log_probs_and_entropies
from or1_megatron.kernels.statistics import Scores, VocabularyShard, merge_over_ranks
from or1_megatron.kernels.tiled_head import Epilogue, HeadSettings, TiledHead

__all__ = ["VocabularyShard", "log_probs_and_entropies", "one_pass_loss", "reference_log_probs_and_entropies"]

Pointwise = Callable[[Tensor, Tensor, slice], tuple[Tensor, Mapping[str, Tensor]]]
"""(log_probs [t], entropies [t], slice of the T tokens) -> (loss summed over these tokens, named detached sums)."""


class _Recompute(torch.autograd.Function):
    """The mode recompute: forward keeps log-sum-exp and entropy per token, backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: HeadSettings
    ) -> tuple[Tensor, Tensor]:
        head = TiledHead(hidden, weight, targets, settings, "recompute")
        statistics = torch.cat([head.statistics(part)[0] for part in head.tiles()], dim=1)
        scores = Scores.of(merge_over_ranks(statistics, settings.shard))
        ctx.save_for_backward(hidden, weight, targets, *vars(scores).values())
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return scores.log_probs, scores.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, *saved = ctx.saved_tensors
        scores = Scores(*saved)
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(scores.log_probs)
        head = TiledHead(hidden, weight, targets, ctx.settings, "recompute")
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = WeightGradient(weight) if ctx.needs_input_grad[1] else None
        for part in head.tiles():
            head.gradients(
                part,
                None,
                scores[part],
                of_log_probs[part],
                None if of_entropies is None else of_entropies[part],
                grad_hidden,
                grad_weight,
            )
        return grad_hidden, None if grad_weight is None else grad_weight.for_autograd(), None, None


def log_probs_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabularyShard,
    *,
    epilogue: Epilogue = "auto",
    budget_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-prob and the entropy of the distribution at its position; both are differentiable.

    Args:
        hidden: [T, H], the same on all ranks of the tensor-parallel group. Each rank gets a part of hidden's gradient;
            the caller sums the parts over the group.
        weight: [V/tp, H], of hidden's dtype. Its gradient is summed in fp32. The sum is in Megatron's ``main_grad`` if
            the weight has one (``head_weight_gradient``), else autograd gets it in the weight's dtype.
        targets: [T] int64 vocabulary ids.
        temperature: divisor of the logits.
        shard: which rows of the vocabulary ``weight`` holds.
        epilogue: "triton", "torch", or "auto" (Triton if there is a GPU and Triton is installed, else torch).
        budget_bytes: most bytes of a tile of logits; None: ``tile_sizes.BUDGET_BYTES``.

    Returns:
        (log_probs, entropies), both [T] fp32, equal on all ranks of the group.

    Raises:
        TypeError: dtypes do not fit.
        ValueError: shapes do not fit.
    """
    settings = HeadSettings(temperature, shard, epilogue, budget_bytes)
    log_probs, entropies = _Recompute.apply(hidden, weight, targets, settings)
    return log_probs, entropies


class _Settled(torch.autograd.Function):
    """Returns a loss whose gradients exist already (mode one_pass). The backward pass returns them, once only."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        loss: Tensor,
        gradients: tuple[Tensor | None, WeightGradient | None],
        upstream: float,
    ) -> Tensor:
        ctx.gradients, ctx.upstream = gradients, upstream
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("one-pass head: its gradients exist once; a second backward pass through it has none")
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        if of_weight is not None and of_weight.in_main_grad:
            if incoming.item() != ctx.upstream:
                raise RuntimeError(
                    f"one-pass head: the loss's gradient arrived as {incoming.item()}, but the weight's gradient was "
                    f"written to main_grad in the forward pass for upstream={ctx.upstream}; give one_pass_loss the "
                    "factor by which the loss is scaled, or use the head that recomputes"
                )
            return of_hidden, of_weight.for_autograd(), None, None, None
        scale = incoming / ctx.upstream
        if of_hidden is not None:
            of_hidden.mul_(scale)
        if of_weight is not None:
            of_weight.sum.mul_(scale)
        return of_hidden, None if of_weight is None else of_weight.for_autograd(), None, None, None


def one_pass_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabularyShard,
    pointwise: Pointwise,
    *,
    upstream: float = 1.0,
    epilogue: Epilogue = "auto",
    budget_bytes: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of all tokens and its gradients in one pass. Call it only if a backward pass follows.

    If the weight has a ``main_grad``, the weight's gradient is in it when this function returns. Under
    ``torch.no_grad()``, or if neither input requires a gradient, only the loss is computed.

    Args:
        hidden, weight, targets, temperature, shard, epilogue, budget_bytes: as in ``log_probs_and_entropies``.
        pointwise: computes the loss of a tile of tokens; called at least once, even without tokens. Its result must
            depend only on each token's log-prob and entropy, and be the same on all ranks of the group.
        upstream: the gradient that the loss will receive in the backward pass: 1 unless the loss is scaled later.

    Returns:
        (loss, sums): the loss is a scalar in fp32. A named sum is the sum over tiles, or the maximum if its name begins
        with ``max_`` (``interfaces.Objective``).

    Raises:
        TypeError: dtypes do not fit.
        ValueError: shapes do not fit, or ``upstream`` is 0.
        RuntimeError: in a second backward pass. Also in the first, if the weight has a ``main_grad`` and the loss
            receives another gradient than ``upstream``.
    """
    if upstream == 0:
        raise ValueError("one_pass_loss: upstream is 0; expected the gradient that the loss will receive")
    grad = torch.is_grad_enabled()
    grad_hidden = torch.empty_like(hidden) if grad and hidden.requires_grad else None
    grad_weight = WeightGradient(weight) if grad and weight.requires_grad else None
    with_grad = grad_hidden is not None or grad_weight is not None
    losses: list[Tensor] = []
    of_tiles: list[Mapping[str, Tensor]] = []
    with torch.no_grad():
        head = TiledHead(hidden, weight, targets, HeadSettings(temperature, shard, epilogue, budget_bytes), "one_pass")
        for part in head.tiles():
            statistics, offsets = head.statistics(part)
            scores = Scores.of(merge_over_ranks(statistics, shard))
            if with_grad:
                loss, named, coefficients = _differentiate(pointwise, scores, part, upstream)
                head.gradients(part, offsets, scores, *coefficients, grad_hidden, grad_weight)
            else:
                loss, named = pointwise(scores.log_probs, scores.entropies, part)
            losses.append(loss)
            of_tiles.append(named)
        total = torch.stack(losses).sum()
        stacked = {name: torch.stack([named[name] for named in of_tiles]) for name in of_tiles[0]}
        sums = {name: of.amax(0) if name.startswith("max_") else of.sum(0) for name, of in stacked.items()}
    if not with_grad:
        return total, sums
    return _Settled.apply(hidden, weight, total, (grad_hidden, grad_weight), upstream), sums


def _differentiate(
    pointwise: Pointwise, scores: Scores, part: slice, upstream: float
) -> tuple[Tensor, Mapping[str, Tensor], tuple[Tensor, Tensor | None]]:
    """Return (loss, sums, (d loss / d log-prob [t], d loss / d entropy [t])), gradients multiplied by ``upstream``.

    The second gradient is None if the loss does not depend on the entropies.
    """
    inputs = scores.log_probs.detach().requires_grad_(), scores.entropies.detach().requires_grad_()
    with torch.enable_grad():
        loss, sums = pointwise(*inputs, part)
    if not loss.requires_grad:
        return loss, sums, (torch.zeros_like(scores.log_probs), None)
    scale = torch.full_like(loss, upstream)
    of_log_probs, of_entropies = torch.autograd.grad(loss, inputs, scale, allow_unused=True)
    if of_log_probs is None:
        of_log_probs = torch.zeros_like(scores.log_probs)
    return loss.detach(), sums, (of_log_probs, of_entropies)
