"""Evaluates, on rank 0 before the update, losses that need whole sequences or the whole mini-batch.

The present weights score the whole mini-batch, autograd gives dL/dlogp_t and dL/dH_t of every token, and the update
runs a pointwise loss with these constants. The gradient is exact under every packing and parallel layout, because

    dL/dtheta = sum_t dL/dlogp_t dlogp_t/dtheta + dL/dH_t dH_t/dtheta

Shapes: N counted tokens of the mini-batch, sample after sample; S samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from or1_megatron.interfaces import Objective, Sequences, TokenInputs, scope_of
from or1_megatron.types import Batch, Float32Array, MicroBatch, Sample, TokenScores, UpdateReport


class Learner(Protocol):
    """The two methods of ``interfaces.Policy`` that an update needs."""

    def score(self, batch: Batch, temperature: float) -> TokenScores: ...

    def update(self, batch: Batch, objective: Objective) -> UpdateReport: ...


def update(policy: Learner, batch: Batch, objective: Objective, one_pass: bool) -> UpdateReport:
    """Make one SGD step. An objective that needs scores (``needs_scores``) is evaluated before the update."""
    if not needs_scores(objective, one_pass):
        return policy.update(batch, objective)
    started_s = time.perf_counter()
    linear = linearise(batch, objective, policy.score(batch, objective.temperature))
    evaluated_s = time.perf_counter() - started_s
    report = policy.update(linear.batch, linear.objective)
    return replace(report, sums=linear.sums, forward_backward_s=report.forward_backward_s + evaluated_s)


def needs_scores(objective: Objective, one_pass: bool) -> bool:
    """Return whether the objective must be evaluated before the update.

    True if its scope is "batch", or if it is "sequence" and the output head is ``one_pass``. The one-pass head forms
    the gradient tile by tile and never sees a whole sequence. The recompute head sees every sequence whole in one
    micro-batch.
    """
    scope = scope_of(objective)
    return scope == "batch" or (scope == "sequence" and one_pass)


@dataclass(frozen=True, slots=True)
class LinearLoss:
    """The loss sum_t g_t log pi_theta + h_t H_t, where g is ``log_prob_gradients`` and h ``entropy_gradients``."""

    temperature: float

    def __call__(
        self, log_probs: Tensor, entropies: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert tokens.log_prob_gradients is not None
        loss = (tokens.log_prob_gradients * log_probs).sum()
        if tokens.entropy_gradients is not None:
            loss = loss + (tokens.entropy_gradients * entropies).sum()
        return loss, {}


class Linearised(NamedTuple):
    """An objective linearised at the present weights: a batch with gradient constants, and the loss that uses them."""

    batch: Batch
    objective: LinearLoss
    sums: dict[str, float]
    """The objective's own sums."""


def linearise(batch: Batch, objective: Objective, scores: TokenScores) -> Linearised:
    """Return the objective linearised in float64 on the whole batch, at ``scores``, which the present weights gave.

    If the loss is not finite, all gradient constants are NaN, so that the update is skipped.
    """
    locations = _locations(batch)
    log_probs, entropies = (_joined(values).requires_grad_() for values in (scores.log_probs, scores.entropies))
    loss, sums = objective(log_probs, entropies, inputs_of(batch.samples, log_probs))
    gradients: tuple[Tensor | None, ...] = (None, None)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, (log_probs, entropies), allow_unused=True)
    of_log_probs = torch.zeros_like(log_probs) if gradients[0] is None else gradients[0]
    if not torch.isfinite(loss):
        of_log_probs = torch.full_like(log_probs, float("nan"))
    rows = [[_bare(row, gradients[1] is not None) for row in rank] for rank in batch.ranks]
    lengths = [len(positions) for _, _, positions in locations]
    for name, of in (("log_prob_gradients", of_log_probs), ("entropy_gradients", gradients[1])):
        parts = () if of is None else of.float().split(lengths)
        for (rank, m, positions), values in zip(locations, parts, strict=of is not None):
            getattr(rows[rank][m], name)[positions] = values.numpy()
    linear = replace(batch, ranks=tuple(tuple(rank) for rank in rows))
    named = {name: float(value) for name, value in {"loss": loss.detach(), **sums}.items()}
    return Linearised(linear, LinearLoss(objective.temperature), named)


_Location = tuple[int, int, NDArray[np.int64]]
"""A sample's data-parallel rank, its packed row on the rank, and its counted positions in the row."""


def _locations(batch: Batch) -> list[_Location]:
    located: dict[int, _Location] = {}
    for r, rank in enumerate(batch.ranks):
        for m, row in enumerate(rank):
            for k, sample in enumerate(row.sample_index):
                start, end = row.cu_seqlens[k], row.cu_seqlens[k + 1]
                located[int(sample)] = r, m, start + row.loss_mask[start:end].nonzero()[0]
    return [located[sample] for sample in range(batch.sample_count)]


def inputs_of(samples: Sequence[Sample], like: Tensor) -> TokenInputs:
    """Return an objective's inputs for the counted tokens, sample after sample, with dtype and device of ``like``."""

    def column(name: str) -> Tensor | None:
        if getattr(samples[0], name) is None:
            return None
        # A single number is for all tokens of its sample.
        values = [np.asarray(getattr(sample, name), dtype=np.float32) for sample in samples]
        tokens = [np.broadcast_to(v, s.loss_mask.shape)[s.loss_mask] for v, s in zip(values, samples, strict=True)]
        return _joined(tokens).to(like)

    lengths = torch.tensor([int(sample.loss_mask.sum()) for sample in samples], device=like.device)
    advantages = column("advantage")
    assert advantages is not None
    return TokenInputs(
        advantages=advantages,
        engine_log_probs=column("engine_log_probs"),
        policy_log_probs=column("policy_log_probs"),
        reference_log_probs=column("reference_log_probs"),
        weights=column("weight"),
        sequences=Sequences(torch.arange(len(samples), device=like.device).repeat_interleave(lengths), lengths),
    )


def _joined(values: Sequence[Float32Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(values)).double()


def _bare(row: MicroBatch, with_entropy: bool) -> MicroBatch:
    """Return the packed row with zeroed gradient arrays, and without the arrays that the linear loss does not read."""
    return replace(
        row,
        engine_log_probs=None,
        policy_log_probs=None,
        reference_log_probs=None,
        weights=None,
        log_prob_gradients=np.zeros(row.token_ids.size, dtype=np.float32),
        entropy_gradients=np.zeros(row.token_ids.size, dtype=np.float32) if with_entropy else None,
    )
