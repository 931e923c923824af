"""The fused head on a GPU, both epilogues, against float64 on all logits; and what it allocates.

Not proven here: speed (benchmarks/gpu/head.py), tensor parallelism over NCCL. The cases, the bounds and the passes
themselves run on the CPU too: tests/kernels/test_head.py, test_head_plan.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from head import peak_bytes
from head_cases import NORMAL_CASES, check_normal, forward_and_backward, normal_case, oracle, relative, run

pytestmark = pytest.mark.gpu

EPILOGUES: list[Any] = ["triton", "torch"]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("name", NORMAL_CASES)
def test_equals_float64(name: str, epilogue: Any) -> None:
    """fp32 inputs; the weight's gradient goes to main_grad, on top of what is there."""
    case = NORMAL_CASES[name]
    check_normal(run(case.to("cuda"), epilogue, into_main_grad=True).cpu(), case)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_bfloat16_inputs(mode: str, epilogue: Any) -> None:
    """bf16 inputs, fp32 statistics and accumulation: only products and p - onehot are rounded."""
    case = replace(normal_case(301, 5003, 136, dtype=torch.bfloat16), mode=mode)
    found, true = run(case.to("cuda"), epilogue, into_main_grad=True).cpu(), oracle(case)
    assert (found.log_probs.double() - true.log_probs).abs().max() <= 1e-3
    assert (found.entropies.double() - true.entropies).abs().max() <= 1e-3
    assert relative(found.of_hidden, true.of_hidden) <= 1e-2
    assert relative(found.of_weight, true.of_weight) <= 1e-2


@pytest.mark.parametrize(("mode", "limit_bytes"), [("recompute", 350e6), ("one_pass", 2.6e9)])
def test_workspace(mode: str, limit_bytes: float) -> None:
    """At N = 32768, V = 152064: all that is allocated beside inputs, the gradients and main_grad (H is small here)."""
    tokens, width, vocabulary = 32768, 256, 152064
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight.main_grad = torch.zeros(vocabulary, width, device="cuda")  # type: ignore[attr-defined]
    targets = torch.randint(vocabulary, (tokens,), device="cuda")

    def clear() -> None:
        hidden.grad = weight.grad = None

    peak = peak_bytes(lambda: forward_and_backward(mode, hidden, weight, targets, None), clear)
    # outputs and accumulators: the hidden gradient in bf16 and fp32, and autograd's copy of the weight's stand-in
    outputs = hidden.numel() * (2 + 4) + weight.numel() * 2
    assert peak - outputs <= limit_bytes
