"""Offload on a GPU: it frees device memory, and everything returns to the bit through page-locked memory.

Not proven here: rates (benchmarks/gpu/offload.py), engines that take the freed memory, several GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("distributed", [True, False])
def test_freed_and_back_to_the_bit(distributed: bool, small_qwen2: Path, gpu_mesh: Any) -> None:
    """Little else stays on the device; parameters, masters and moments return through overwritten
    memory; the next update's gradient norm is that of a policy that stayed (to the rounding of atomic additions)."""
    import torch
    from gpu_models import batch_of, make_policy

    from or1_megatron.parallel.offload import Offload
    from or1_megatron.rl.loss import ClippedPolicyLoss

    batch = batch_of([400, 300, 200], 512, 5003)
    objective = ClippedPolicyLoss(0.2, 0.2, 0.01, 1.0, on_policy=True)

    def update(policy: Any) -> float:
        norm: float = policy.update(batch.ranks[0], objective, batch.token_count).grad_norm
        return norm

    def owned(policy: Any) -> list[torch.Tensor]:
        inner = [one.optimizer for one in policy.optimizer.chained_optimizers]
        tensors = [p.data for chunk in policy.chunks for p in chunk.module.parameters()]
        tensors += [p.data for one in inner for group in one.param_groups for p in group["params"]]
        return tensors + [t for one in inner for state in one.state.values() for t in state.values()]

    options = {"micro_batch_tokens": 512, "distributed_optimizer": distributed}
    stays, moves = (make_policy(small_qwen2, gpu_mesh, **options) for _ in range(2))
    assert update(stays) == pytest.approx(update(moves), rel=1e-3)
    offload = Offload(moves.chunks, moves.optimizer)
    kept = [t.cpu() for t in owned(moves)]
    before = torch.cuda.memory_allocated()
    moved = offload.offload("gradients", "optimizer", "parameters")
    freed = before - torch.cuda.memory_allocated()
    assert moved > 0
    assert freed >= 0.98 * moved
    taken = torch.full((moved // 4,), torch.nan, device="cuda")  # as an engine would write where they lay
    del taken
    torch.cuda.synchronize()
    offload.restore("parameters", "optimizer", "gradients")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(kept, owned(moves), strict=True))
    assert update(moves) == pytest.approx(update(stays), rel=1e-3)
