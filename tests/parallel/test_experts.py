"""The experts in two rounds of products against Megatron's, which calls them one by one: equal to the bit.

Not proven here: speed; several ranks (test_families); Transformer Engine's weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gradient_sums import HF

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.model import transformer_config
from or1_megatron.weights.families import FAMILIES

EXPERTS, CHOSEN, TOKENS = 6, 2, 50
SPARSE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def computed(kind: str, dtype: str) -> list[Any]:
    """Return the output, the gradients of tokens and router weights, and each weight's main_grad of two passes."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from or1_megatron.parallel.experts import GroupedExperts

    config = transformer_config({**HF, **SPARSE}, FAMILIES["Qwen3MoeForCausalLM"], ParallelConfig(), dtype)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    linears: Any = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = {"one by one": SequentialMLP, "grouped": GroupedExperts}[kind](
        EXPERTS, config, linears, pg_collection=groups
    )
    weights: list[Any] = list(layer.parameters())
    generator = torch.Generator().manual_seed(1)
    for weight in weights:
        torch.nn.init.normal_(weight, generator=generator)
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
    counts = torch.tensor([20, 0, 37, 1, 0, CHOSEN * TOKENS - 58])  # two experts have no token
    results: list[Any] = []
    for _ in range(2):
        tokens, grad = (
            torch.randn(CHOSEN * TOKENS, HF["hidden_size"], generator=generator).to(weights[0].dtype) for _ in range(2)
        )
        probs = torch.rand(CHOSEN * TOKENS, generator=generator).requires_grad_()
        out, bias = layer(tokens.requires_grad_(), counts, probs)
        assert bias is None
        out.backward(grad)
        results += [out.detach(), tokens.grad, probs.grad]
        assert all(weight.grad_added_to_main_grad and weight.grad is not None for weight in weights)
        layer.zero_grad()  # as DistributedDataParallel's hook does, which runs because there is a gradient
    return results + [weight.main_grad for weight in weights]


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_experts_are_megatrons_to_the_bit(dtype: str) -> None:
    expected, found = (computed(kind, dtype) for kind in ("one by one", "grouped"))
    assert len(expected) == 6 + 2 * EXPERTS
    for right, mine in zip(expected, found, strict=True):
        assert torch.equal(right, mine) and right.isfinite().all()
