"""How gradients are summed: over micro-batches by the product that makes them, and over ranks in buckets.

Not proven here: that either is faster on a GPU. Parity of whole models with both is test_parity's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problem
import pytest
import torch

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.model import transformer_config
from or1_megatron.weights.families import FAMILIES

HF: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
TOKENS, ROWS = 50, 40


def summed(dtype: str) -> tuple[Any, torch.Tensor]:
    """Differentiate three micro-batches; return (the weight, the sum of their gradients in float64)."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = transformer_config(HF, FAMILIES["Qwen2ForCausalLM"], ParallelConfig(), dtype)
    init: Any = lambda weight: None  # noqa: E731
    linear = ColumnParallelLinear(HF["hidden_size"], ROWS, config=config, init_method=init, bias=False)
    weight: Any = linear.weight
    torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad = False  # as DistributedDataParallel makes it
    total = torch.zeros(weight.shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        x = torch.randn(TOKENS, 1, HF["hidden_size"], generator=generator).to(weight.dtype).requires_grad_()
        g = torch.randn(TOKENS, 1, ROWS, generator=generator).to(weight.dtype)
        linear(x)[0].backward(g)
        total += g[:, 0].double().t() @ x.detach()[:, 0].double()
    return weight, total


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_added_in_fp32(dtype: str) -> None:
    """Exact to fp32's rounding (2^-24 per product), also in bf16, where a gradient by itself is rounded to 2^-9."""
    weight, total = summed(dtype)
    assert weight.grad_added_to_main_grad  # so DistributedDataParallel adds nothing to it
    apart = (weight.main_grad.double() - total).abs().max() / total.abs().max()
    assert float(apart) < 1e-6


@pytest.mark.usefixtures("mesh")
def test_buckets_are_cut_as_asked(tiny_qwen2: Path) -> None:
    """A bucket is closed by the parameter with which it reaches the size; no parameter has more than 12,288 numbers
    (fc1: 2 * 96 * 64). The layout is also in test_parity, over two ranks."""

    def sizes(**parallel: Any) -> list[int]:
        policy = problem.make_policy(tiny_qwen2, overlap_grad_reduce=True, **parallel)
        return [sum(p.numel() for p in bucket.params_list) for bucket in policy.chunks[0].buffers[0].buckets]

    cut = sizes(grad_bucket_size=20_000)
    whole = sizes()
    assert len(whole) == 1 and sum(cut) == whole[0]
    assert all(20_000 <= size < 20_000 + 12_288 for size in cut[:-1]) and len(cut) > 3


def test_buckets_without_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="grad_bucket_size needs overlap_grad_reduce"):
        ParallelConfig(grad_bucket_size=1000)
