"""Compares the speed of our expert layer (64 small experts, 8 per token) with Megatron's, which calls experts in turn.

OMP_NUM_THREADS=1 python lab/benchmarks/experts.py
"""

import time
from statistics import median
from typing import Any

import or1_megatron.parallel  # noqa: F401  # isort: skip  # before Megatron
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from result import figure, write_result

from or1_megatron.config.recipes import named
from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.experts import GroupedExperts
from or1_megatron.parallel.mesh import build_mesh, start_process_group
from or1_megatron.parallel.model import transformer_config
from or1_megatron.weights.families import family_of, read_hf_config

SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 64, "num_experts_per_tok": 8}
HF = {**read_hf_config(named("shape")["qwen3_235b_a22b"]), **SIZES}
LINEARS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
start_process_group(60)
build_mesh(ParallelConfig(), seed=1)


def layer_of(kind: Any) -> Any:
    config = transformer_config(HF, family_of(HF), ParallelConfig(), "float32")
    layer = kind(64, config, LINEARS, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    for weight in layer.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    return layer


def seconds(layer: Any, tokens: int) -> float:
    """Return the seconds of a forward and backward pass over ``tokens`` tokens, the same number for each expert."""
    hidden, probs = torch.randn(8 * tokens, 128).requires_grad_(), torch.rand(8 * tokens).requires_grad_()
    started_s = time.perf_counter()
    layer(hidden, torch.full((64,), tokens // 8), probs)[0].sum().backward()
    return time.perf_counter() - started_s


layers = [layer_of(kind) for kind in (GroupedExperts.__base__, GroupedExperts)]
ratios = {}
for tokens in (16, 64, 256, 1024, 4096):
    pairs = [[seconds(layer, tokens) for layer in layers] for _ in range(24)][4:]
    ratios[f"{tokens} tokens"] = figure(median(one / grouped for one, grouped in pairs), "factor")
write_result("experts", ratios, SIZES)
