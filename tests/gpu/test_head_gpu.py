"""The fused head on a GPU, both epilogues, against float64 on all logits; and what it allocates.

Not proven here: speed (benchmarks/gpu/head.py), tensor parallelism over NCCL.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from or1_megatron.kernels.head import (
    VocabularyShard,
    log_probs_and_entropies,
    one_pass_loss,
    reference_log_probs_and_entropies,
)

pytestmark = pytest.mark.gpu

EPILOGUES: list[Any] = ["triton", "torch"]
CASES = {
    "tails everywhere": (301, 136, 5003, 0, 1.0, 0.0),
    "temperature 0.6": (256, 128, 4096, 0, 0.6, 0.0),
    "one token": (1, 64, 777, 0, 1.0, 0.0),
    "padded rows": (130, 64, 1000, 24, 1.0, 0.0),
    "all logits very negative": (65, 64, 1501, 0, 1.0, -1e4),
}
"""Tokens, hidden, vocabulary, padded rows, temperature, an offset of all logits of a token."""


def problem(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, VocabularyShard, float]:
    """Return (hidden, weight, targets, gradients of log-probs and entropies, shard, temperature)."""
    tokens, width, vocabulary, padding, temperature, shift = CASES[case]
    generator = torch.Generator("cuda").manual_seed(tokens + vocabulary)
    options: dict[str, Any] = {"generator": generator, "device": "cuda"}
    hidden = torch.randn(tokens, width, **options)
    weight = torch.randn(vocabulary + padding, width, **options) / width**0.5 * 2
    hidden[:, 0], weight[:, 0] = 1.0, shift
    weight[vocabulary:] = 1e3  # a padded row that is counted would win
    targets = torch.randint(vocabulary, (tokens,), **options)
    upstream = torch.randn(2, tokens, **options)
    shard = VocabularyShard(first_row=0, true_vocab_size=vocabulary)
    return hidden.to(dtype), weight.to(dtype), targets, upstream[0], upstream[1], shard, temperature


def oracle(
    hidden: Tensor, weight: Tensor, targets: Tensor, a: Tensor, c: Tensor, shard: VocabularyShard, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log-probs, entropies, gradient of hidden, of weight) in float64; the loss is sum(a log p) + sum(c H)."""
    x = hidden.double().requires_grad_()
    w = weight[: shard.true_vocab_size].double().requires_grad_()
    log_probs, entropies = reference_log_probs_and_entropies(x, w, targets, temperature)
    (log_probs @ a.double() + entropies @ c.double()).backward()
    assert x.grad is not None and w.grad is not None
    return log_probs.detach(), entropies.detach(), x.grad, w.grad


def relative(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
@pytest.mark.parametrize("case", CASES)
def test_equals_float64(case: str, mode: str, epilogue: Any) -> None:
    """fp32 inputs: log-prob and entropy within 1e-5, gradients within 1e-4 relative; the weight's gradient goes to
    main_grad, on top of what is there. Logits of size 1e4 carry an error of 1e-3 before the head has done anything.
    """
    hidden, weight, targets, a, c, shard, temperature = problem(case, torch.float32)
    log_probs, entropies, of_hidden, of_weight = oracle(hidden, weight, targets, a, c, shard, temperature)
    hidden.requires_grad_()
    weight.requires_grad_()
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    if mode == "recompute":
        found = log_probs_and_entropies(hidden, weight, targets, temperature, shard, epilogue=epilogue)
        (found[0] @ a + found[1] @ c).backward()
    else:
        seen: list[tuple[Tensor, Tensor]] = []

        def pointwise(p: Tensor, h: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
            seen.append((p.detach(), h.detach()))
            return (p * a[part]).sum() + (h * c[part]).sum(), {}

        loss, _ = one_pass_loss(hidden, weight, targets, temperature, shard, pointwise, epilogue=epilogue)
        loss.backward()
        found = torch.cat([p for p, _ in seen]), torch.cat([h for _, h in seen])
    shift = CASES[case][5]
    bound = max(1e-5, abs(shift) * 1e-6)
    assert float((found[0].double() - log_probs).abs().max()) <= bound
    assert float((found[1].double() - entropies).abs().max()) <= bound
    assert float(found[0].max()) <= 0.0
    of_main = weight.main_grad - 1.0  # type: ignore[attr-defined]
    assert not of_main[shard.true_vocab_size :].any()
    if shift == 0.0:
        assert hidden.grad is not None
        assert relative(hidden.grad, of_hidden) <= 1e-4
        assert relative(of_main[: shard.true_vocab_size], of_weight) <= 1e-4


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_bfloat16_inputs(epilogue: Any) -> None:
    """bf16 inputs, fp32 statistics and accumulation: only products and p - onehot are rounded."""
    hidden, weight, targets, a, c, shard, temperature = problem("tails everywhere", torch.bfloat16)
    log_probs, entropies, of_hidden, of_weight = oracle(hidden, weight, targets, a, c, shard, temperature)
    hidden.requires_grad_()
    weight.requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    found = log_probs_and_entropies(hidden, weight, targets, temperature, shard, epilogue=epilogue)
    (found[0] @ a + found[1] @ c).backward()
    assert float((found[0].double() - log_probs).abs().max()) <= 1e-3
    assert float((found[1].double() - entropies).abs().max()) <= 1e-3
    assert hidden.grad is not None
    assert relative(hidden.grad, of_hidden) <= 1e-2
    assert relative(weight.main_grad, of_weight) <= 1e-2  # type: ignore[attr-defined]


@pytest.mark.parametrize(("mode", "limit_bytes"), [("recompute", 350e6), ("one_pass", 1.3e9)])
def test_workspace(mode: str, limit_bytes: float) -> None:
    """At N = 32768, V = 152064: all that is allocated beside inputs, the gradients and main_grad (H is small here)."""
    tokens, width, vocabulary = 32768, 256, 152064
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight.main_grad = torch.zeros(vocabulary, width, device="cuda")  # type: ignore[attr-defined]
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    shard = VocabularyShard(first_row=0, true_vocab_size=vocabulary)

    def pointwise(p: Tensor, h: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return -p.sum() - 0.1 * h.sum(), {}

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if mode == "recompute":
        log_probs, entropies = log_probs_and_entropies(hidden, weight, targets, 1.0, shard)
        (-log_probs.sum() - 0.1 * entropies.sum()).backward()
    else:
        one_pass_loss(hidden, weight, targets, 1.0, shard, pointwise)[0].backward()
    torch.cuda.synchronize()
    # outputs and accumulators: the hidden gradient in bf16 and fp32, and autograd's copy of the weight's stand-in
    outputs = hidden.numel() * (2 + 4) + weight.numel() * 2
    assert torch.cuda.max_memory_allocated() - before - outputs <= limit_bytes
