"""bfloat16 parameters on fp32 master weights and fp32 gradients, in one process.

Not proven here: reduction of gradients over ranks in fp32 (Megatron's buffers are fp32 by ``grad_reduce_in_fp32``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import problem
import pytest
import torch

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy

STEPS = 40
RATE = 2e-5
"""Below half the spacing of bf16 numbers (2^-9 of a value) for every parameter above 0.01."""


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    start_process_group(60)
    yield build_mesh(ParallelConfig(), seed=1)
    stop_process_group()


def trained(folder: Path, mesh: Mesh, dtype: str, distributed: bool) -> dict[str, torch.Tensor]:
    parallel = ParallelConfig(distributed_optimizer=distributed, micro_batch_tokens=256)
    policy = MegatronPolicy(
        ModelConfig.model_validate({"hf": folder, "dtype": dtype}), parallel, OptimizerConfig(lr=RATE), mesh
    )
    batch = problem.batch(1, 256)
    for _ in range(STEPS):
        policy.update(batch.ranks[0], problem.WeightedLogProb(), batch.token_count)
    return {name: tensor.float() for name, tensor in policy.weights if tensor is not None}


@pytest.mark.parametrize("distributed", [False, True])
def test_steps_below_bf16_spacing_accumulate(distributed: bool, mesh: Mesh, tiny_qwen2: Path) -> None:
    """Forty steps, each of which rounds to nothing in bf16, move the weights as they move fp32 ones."""
    from safetensors.torch import load_file

    whole = load_file(tiny_qwen2 / "model.safetensors")
    start = {name: tensor.bfloat16().float() for name, tensor in whole.items()}
    full, half = (trained(tiny_qwen2, mesh, dtype, distributed) for dtype in ("float32", "bfloat16"))
    moved, near = [], []
    for name, at in start.items():
        movable = (at.abs() > 0.01) & (at.abs() < 0.25)
        spacing = 2.0 ** (at.abs().log2().floor() - 7)  # of bf16 numbers there
        moved.append((half[name] != at)[movable])
        near.append((((half[name] - at) - (full[name] - whole[name])).abs() <= spacing)[movable])
    assert float(torch.cat(moved).float().mean()) > 0.5  # a step of 2e-5 taken in bf16 would have moved none of them
    assert float(torch.cat(near).float().mean()) > 0.95
