"""Inputs of the head with their float64 oracle, and a run of them through either epilogue in either mode.

``python head_cases.py EPILOGUE IN OUT`` runs the cases of a file that torch has saved: Triton's kernels
can be interpreted on the CPU only in a process that had TRITON_INTERPRET=1 before it imported triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from or1_megatron.kernels.head import (
    VocabularyShard,
    log_probs_and_entropies,
    one_pass_loss,
    reference_log_probs_and_entropies,
)
from or1_megatron.selftest.checks.kernels import fp32_bounds


@dataclass(frozen=True)
class Case:
    """One call. The loss is sum(a log p) + sum(c H); without ``c`` it does not depend on the entropies."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V + padding, H]
    targets: Tensor  # [T]
    a: Tensor  # [T]
    c: Tensor | None  # [T]
    temperature: float
    true_vocab_size: int
    budget_bytes: int | None
    mode: str = "recompute"

    def to(self, device: str) -> Case:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Found:
    log_probs: Tensor
    entropies: Tensor
    of_hidden: Tensor
    of_weight: Tensor

    def __iter__(self) -> Any:
        return iter((self.log_probs, self.entropies, self.of_hidden, self.of_weight))

    def cpu(self) -> Found:
        return Found(*(tensor.cpu() for tensor in self))


def random_case(
    tokens: int,
    vocabulary: int,
    *,
    hidden: int = 24,
    padding: int = 0,
    temperature: float = 1.0,
    shift: float = 0.0,
    entropy: bool = True,
    tile: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Inputs that are multiples of 1/8, so that logits are exact in fp32 even where ``shift`` moves all by 10^4.

    ``tile``: the budget is that of a square of so many tokens by so many rows.
    """
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    eighths = [
        torch.randint(-10, 11, shape, generator=generator) / 8 for shape in ((tokens, hidden), (vocabulary, hidden))
    ]
    x, weight = eighths
    x[:, 0], weight[:, 0] = shift, 1.0
    padded = torch.cat((weight, torch.full((padding, hidden), 50.0)))
    return Case(
        hidden=x.to(dtype),
        weight=padded.to(dtype),
        targets=torch.randint(vocabulary, (tokens,), generator=generator),
        a=torch.randn(tokens, generator=generator),
        c=torch.randn(tokens, generator=generator) if entropy else None,
        temperature=temperature,
        true_vocab_size=vocabulary,
        budget_bytes=4 * tile * tile,
    )


def in_both_modes(cases: dict[str, Case]) -> dict[str, Case]:
    return {
        f"{name}, {mode}": replace(case, mode=mode)
        for name, case in cases.items()
        for mode in ("recompute", "one_pass")
    }


def normal_case(
    tokens: int,
    vocabulary: int,
    hidden: int,
    *,
    padding: int = 0,
    temperature: float = 1.0,
    shift: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random normal inputs and logits, whose dot products fp32 does round."""
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    x = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocabulary + padding, hidden, generator=generator) / hidden**0.5 * 2
    x[:, 0], weight[:, 0] = 1.0, shift
    weight[vocabulary:] = 1e3  # a padded row that is counted would win
    return Case(
        hidden=x.to(dtype),
        weight=weight.to(dtype),
        targets=torch.randint(vocabulary, (tokens,), generator=generator),
        a=torch.randn(tokens, generator=generator),
        c=torch.randn(tokens, generator=generator),
        temperature=temperature,
        true_vocab_size=vocabulary,
        budget_bytes=None,
    )


NORMAL_CASES = in_both_modes(
    {
        "tails everywhere": normal_case(301, 5003, 136),
        "temperature 0.6": normal_case(256, 4096, 128, temperature=0.6),
        "one token": normal_case(1, 777, 64),
        "padded rows": normal_case(130, 1000, 64, padding=24),
        "all logits very negative": normal_case(65, 1501, 64, shift=-1e4),
    }
)


def check_normal(found: Found, case: Case) -> None:
    """fp32 inputs: scores within ``fp32_bounds`` of float64; gradients within 1e-4 of their norm, where logits of size
    1e4 have not lost more before the head has done anything; the padding's are 0."""
    true = oracle(case)
    bounds = fp32_bounds(case.hidden, case.weight[: case.true_vocab_size], case.temperature)
    of_log_probs, of_entropies = bounds
    assert (found.log_probs.double() - true.log_probs).abs().max() <= of_log_probs
    assert (found.entropies.double() - true.entropies).abs().max() <= of_entropies
    assert found.log_probs.max() <= 0.0
    assert not found.of_weight[case.true_vocab_size :].any()
    if float(case.weight[0, 0]) == 0.0:
        assert relative(found.of_hidden, true.of_hidden) <= 1e-4
        assert relative(found.of_weight, true.of_weight) <= 1e-4


def relative(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm().clamp_min(1e-30))


def oracle(case: Case) -> Found:
    """Compute it by autograd on the whole matrix in float64; the padding's gradient is 0."""
    x = case.hidden.detach().double().requires_grad_()
    w = case.weight.detach().double().requires_grad_()
    log_probs, entropies = reference_log_probs_and_entropies(
        x, w[: case.true_vocab_size], case.targets, case.temperature
    )
    loss = log_probs @ case.a.double()
    if case.c is not None:
        loss = loss + entropies @ case.c.double()
    loss.backward()
    assert x.grad is not None and w.grad is not None
    return Found(log_probs.detach(), entropies.detach(), x.grad, w.grad)


def run(
    case: Case, epilogue: Any = "torch", shard: VocabularyShard | None = None, *, into_main_grad: bool = False
) -> Found:
    """Compute it with the head; with a ``shard``, ``weight`` holds that shard's rows. ``into_main_grad``: the weight's
    gradient goes there, on top of ones."""
    x, w = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    if into_main_grad:
        w.main_grad = torch.ones(w.shape, device=w.device)  # type: ignore[attr-defined]
    shard = shard or VocabularyShard(0, case.true_vocab_size)
    seen: list[tuple[Tensor, Tensor]] = []

    def pointwise(log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append((log_probs.detach(), entropies.detach()))
        loss = log_probs @ case.a[part]
        if case.c is not None:
            loss = loss + entropies @ case.c[part]
        return loss, {}

    arguments = (x, w, case.targets, case.temperature, shard)
    options: Any = {"epilogue": epilogue, "budget_bytes": case.budget_bytes}
    if case.mode == "one_pass":
        loss, _ = one_pass_loss(*arguments, pointwise, **options)
    else:
        loss, _ = pointwise(*log_probs_and_entropies(*arguments, **options), slice(None))
    loss.backward()
    assert x.grad is not None and w.grad is not None
    log_probs, entropies = (torch.cat(parts) for parts in zip(*seen, strict=True))
    of_weight = w.main_grad - 1.0 if into_main_grad else w.grad  # type: ignore[attr-defined]
    return Found(log_probs, entropies, x.grad, of_weight)


def forward_and_backward(mode: str, hidden: Tensor, weight: Tensor, targets: Tensor, budget_bytes: int | None) -> None:
    """Run both passes of -sum(log p + 0.1 H), with nothing allocated beside what the head does."""
    arguments = (hidden, weight, targets, 0.6, VocabularyShard(0, len(weight)))

    def pointwise(log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_probs.sum() - 0.1 * entropies.sum(), {}

    if mode == "one_pass":
        loss, _ = one_pass_loss(*arguments, pointwise, budget_bytes=budget_bytes)
    else:
        loss, _ = pointwise(*log_probs_and_entropies(*arguments, budget_bytes=budget_bytes), slice(None))
    loss.backward()


def run_interpreted(cases: dict[str, Case], folder: Path) -> dict[str, Found]:
    """Run Triton's kernels, interpreted in a process of its own."""
    torch.save({name: vars(case) for name, case in cases.items()}, folder / "cases.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "triton", str(folder / "cases.pt"), str(folder / "found.pt")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Found(**fields) for name, fields in torch.load(folder / "found.pt").items()}


def main(epilogue: str, cases: str, found: str) -> None:
    torch.set_num_threads(1)
    if epilogue == "triton":
        from or1_megatron.kernels import tiles_triton

        tiles_triton._BLOCK = 16  # several blocks and a tail in rows of a hundred logits
    torch.save({name: vars(run(Case(**fields), epilogue)) for name, fields in torch.load(cases).items()}, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
