"""Objectives evaluated on rank 0 before the update: the gradient is that of the objective itself, at every packing.

The policy is the table of ``fakes``; ``parallel/test_parity`` does the same with Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fakes import Clock, TablePolicy, TableRollouts

from or1_megatron.interfaces import Scope, Sequences, TokenInputs
from or1_megatron.rl.batch import pack
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.objectives.estimators import no_tokens, ratio_of
from or1_megatron.rl.objectives.gspo import GSPO
from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, Surrogate
from or1_megatron.rl.objectives.whole_batch import linearise, needs_scores
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import Sample

COMMON: dict[str, Any] = {"entropy_coefficient": 0.1, "temperature": 0.7, "on_policy": False, "kl_coefficient": 0.2}


@dataclass(frozen=True)
class Centred(PolicyGradientLoss):
    """J = rho (A - mean A), constant for tokens whose log-prob is above the mini-batch's mean: scope batch."""

    own_scope: ClassVar[Scope] = "batch"

    def surrogate(self, log_probs: torch.Tensor, old: torch.Tensor, tokens: TokenInputs) -> Surrogate:
        ratio = ratio_of(log_probs, old)
        values = ratio * (tokens.advantages - tokens.advantages.mean())
        above = log_probs > log_probs.mean()
        return Surrogate(torch.where(above, values.detach(), values), ratio, no_tokens(ratio))


OBJECTIVES = [
    GSPO(0.05, 0.05, **COMMON),
    Centred(**COMMON),
    ClippedPolicyLoss(0.2, 0.2, correction="truncated", correction_cap=1.3, correction_level="geometric", **COMMON),
]


def samples() -> list[Sample]:
    rng = np.random.default_rng(2)
    made = []
    for i in range(9):
        n = int(rng.integers(2, 12))
        mask = np.ones(n, dtype=np.bool_)
        mask[n // 2] = i % 3 > 0  # some tokens are not counted
        own, noise = rng.normal(-2, 0.3, n), rng.normal(0, 0.3, (3, n))
        engine, policy, reference = ((own + added).astype(np.float32) for added in noise)
        tokens = rng.integers(0, 8, n).astype(np.int32)
        prompt = np.array([8 + i % 4], dtype=np.int32)
        advantage = float(np.float32(rng.normal()))
        made.append(Sample(prompt, tokens, advantage, mask, engine, policy, reference))
    return made


def policy() -> TablePolicy:
    clock = Clock()
    made = TablePolicy(4, TableRollouts(clock), clock)
    with torch.no_grad():
        made.table.copy_(torch.from_numpy(np.random.default_rng(5).normal(size=made.table.shape)))
    return made


def directly(objective: Any, made: TablePolicy) -> torch.Tensor:
    """Return the gradient of the table by plain autograd through the objective on all samples at once."""
    columns: dict[str, list[torch.Tensor]] = {}
    lengths, picked = [], []
    table = made.table.detach().clone().requires_grad_()
    for sample in samples():
        before = np.concatenate((sample.prompt_ids[-1:], sample.response_ids[:-1]))[sample.loss_mask]
        rows = (table[torch.from_numpy(before).long()] / objective.temperature).log_softmax(-1)
        chosen = rows.gather(1, torch.from_numpy(sample.response_ids[sample.loss_mask]).long()[:, None])[:, 0]
        picked.append((chosen, -(rows.exp() * rows).sum(-1)))
        lengths.append(len(chosen))
        for name in ("engine_log_probs", "policy_log_probs", "reference_log_probs"):
            columns.setdefault(name, []).append(torch.from_numpy(getattr(sample, name)[sample.loss_mask]).double())
        columns.setdefault("advantages", []).append(torch.full((lengths[-1],), sample.advantage).double())
    sizes = torch.tensor(lengths)
    whole = Sequences(torch.arange(9).repeat_interleave(sizes), sizes)
    inputs = TokenInputs(**{name: torch.cat(values) for name, values in columns.items()}, sequences=whole)
    log_probs, entropies = (torch.cat(kind) for kind in zip(*picked, strict=True))
    loss, _ = objective(log_probs, entropies, inputs)
    (gradient,) = torch.autograd.grad(loss / len(log_probs), table)
    return gradient


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize(("ranks", "budget"), [(1, 200), (2, 30), (3, 16)])
def test_the_linear_loss_has_the_objectives_gradient(objective: Any, ranks: int, budget: int) -> None:
    made = policy()
    batch = pack(samples(), BatchLayout(data_ranks=ranks, budget_tokens=budget, alignment=2))
    linear = linearise(batch, objective, made.score(batch, objective.temperature))
    made.gradient(linear.batch, linear.objective)
    assert made.table.grad is not None
    torch.testing.assert_close(made.table.grad, directly(objective, made), rtol=1e-5, atol=1e-8)
    assert all(np.isfinite(value) for value in linear.sums.values()) and "loss" in linear.sums


def test_a_loss_that_is_not_finite_makes_the_gradient_so() -> None:
    """The update then sees a gradient norm that is not finite, and is skipped, also when the loss alone is infinite."""

    @dataclass(frozen=True)
    class Infinite:
        temperature: float = 1.0
        scope: str = "batch"

        def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
            return log_probs.sum() + torch.tensor(float("inf")), {}

    made, batch = policy(), pack(samples(), BatchLayout(data_ranks=1, budget_tokens=200, alignment=2))
    linear = linearise(batch, Infinite(), made.score(batch, 1.0))  # type: ignore[arg-type]  # mypy's view of a local class
    made.gradient(linear.batch, linear.objective)
    assert made.table.grad is not None and not torch.isfinite(made.table.grad).all()


def test_who_needs_scores() -> None:
    """Objectives of a sequence need them in one-pass mode only, those of the batch always; on policy GSPO is pointwise
    and needs none."""
    clipped = ClippedPolicyLoss(0.2, 0.2, **COMMON)
    needs = [[needs_scores(objective, one_pass) for one_pass in (False, True)] for objective in (clipped, *OBJECTIVES)]
    assert needs == [[False, False], [False, True], [True, True], [False, True]]
    assert not needs_scores(replace(OBJECTIVES[0], on_policy=True), True)  # type: ignore[type-var]  # a dataclass


def test_sequences_by_hand() -> None:
    """Two sequences (1, 2) and (3) have sums 3 and 3, means 1.5 and 3."""
    sizes = torch.tensor([2, 1])
    both = Sequences(torch.tensor([0, 0, 1]), sizes)
    values = torch.tensor([1.0, 2.0, 3.0])
    assert both.sum(values).tolist() == [3, 3] and both.mean(values).tolist() == [1.5, 3]
    assert both.spread(both.mean(values)).tolist() == [1.5, 1.5, 3]
