"""How fast a layer of 64 small experts is, of which 8 compute a token, against Megatron's, which calls them one by one.

OMP_NUM_THREADS=1 python lab/benchmarks/experts.py
"""

import time
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


def tokens_per_s(kind: Any, tokens: int = 1024) -> float:
    """Return the speed of the fastest forward and backward pass of 40, with as many tokens for each expert."""
    config = transformer_config(HF, family_of(HF), ParallelConfig(), "float32")
    layer, times = kind(64, config, LINEARS, pg_collection=ProcessGroupCollection.use_mpu_process_groups()), []
    for weight in layer.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    for _ in range(40):
        hidden, probs = torch.randn(8 * tokens, 128).requires_grad_(), torch.rand(8 * tokens).requires_grad_()
        started_s = time.perf_counter()
        layer(hidden, torch.full((64,), tokens // 8), probs)[0].sum().backward()
        times.append(time.perf_counter() - started_s)
    return tokens / min(times)


one_by_one, grouped = tokens_per_s(GroupedExperts.__base__), tokens_per_s(GroupedExperts)
speeds = {"one by one": figure(one_by_one, "tokens/s"), "grouped": figure(grouped, "tokens/s")}
write_result("experts", {**speeds, "ratio": figure(grouped / one_by_one, "factor", at_least=3.0)}, SIZES)
