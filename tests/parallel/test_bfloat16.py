"""bfloat16 parameters on fp32 master weights and fp32 gradients, in one process.

Not proven here: reduction of gradients over ranks in fp32 (Megatron's buffers are fp32 by ``grad_reduce_in_fp32``).
"""

from __future__ import annotations

from pathlib import Path

import problem
import pytest
import torch

STEPS = 40
RATE = 2e-5
"""Below half the spacing of bf16 numbers (2^-9 of a value) for every parameter above 0.01."""


def trained(folder: Path, dtype: str, distributed: bool) -> dict[str, torch.Tensor]:
    policy = problem.make_policy(folder, dtype, RATE, distributed_optimizer=distributed, micro_batch_tokens=256)
    batch = problem.batch(1, 256)
    for _ in range(STEPS):
        problem.update(policy, batch)
    return {name: tensor.float() for name, tensor in policy.weights if tensor is not None}


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("distributed", [False, True])
def test_steps_below_bf16_spacing_accumulate(distributed: bool, tiny_qwen2: Path) -> None:
    """Forty steps, each of which rounds to nothing in bf16, move the weights as they move fp32 ones."""
    from safetensors.torch import load_file

    whole = load_file(tiny_qwen2 / "model.safetensors")
    start = {name: tensor.bfloat16().float() for name, tensor in whole.items()}
    full, half = (trained(tiny_qwen2, dtype, distributed) for dtype in ("float32", "bfloat16"))
    moved, near = [], []
    for name, at in start.items():
        movable = (at.abs() > 0.01) & (at.abs() < 0.25)
        spacing = 2.0 ** (at.abs().log2().floor() - 7)  # of bf16 numbers there
        moved.append((half[name] != at)[movable])
        near.append((((half[name] - at) - (full[name] - whole[name])).abs() <= spacing)[movable])
    assert float(torch.cat(moved).float().mean()) > 0.5  # a step of 2e-5 taken in bf16 would have moved none of them
    assert float(torch.cat(near).float().mean()) > 0.95
