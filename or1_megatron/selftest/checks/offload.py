"""Self-test of offload to host memory (parameters, gradients, optimizer state): bit-exactness, freed bytes, rate."""

from __future__ import annotations

import torch

from or1_megatron.parallel.mesh import stop_process_group
from or1_megatron.parallel.offload import Offload
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.selftest.models import OBJECTIVE, batch_of, make_policy, one_rank, random_qwen2
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.timing import copy_gb_per_s, free_bytes, seconds_of


def offload(context: Context) -> None:
    """Move a policy's state to the host and back, and check that it is the same. On a GPU, measure memory and rate."""
    cuda = context.machine.cuda
    model = random_qwen2("0.5B" if cuda else "tiny", context.folder)
    policy = make_policy(model, one_rank(), micro_batch_tokens=256)
    batch = batch_of([48, 32, 40], 64, policy.hf["vocab_size"])
    policy.update(batch.ranks[0], OBJECTIVE, batch.token_count)  # so that there are moments to move
    mover = Offload(policy.chunks, policy.optimizer)
    kept = [tensor.clone() for tensor in owned(policy)]
    torch.cuda.empty_cache()
    free = free_bytes()
    held = mover.offload("parameters", "gradients", "optimizer")  # which also allocates page-locked memory
    freed = free_bytes() - free
    mover.restore("parameters", "gradients", "optimizer")
    exact = all(torch.equal(a, b) for a, b in zip(kept, owned(policy), strict=True))
    context.require("bit-exact", exact)
    context.measure("parameters, gradients and optimizer", held / 2**30, "GiB")
    if cuda:
        context.require("freed on the device / held", freed / held, "share", at_least=0.95)
        moved: list[int] = []
        seconds = seconds_of(lambda: moved.append(mover.offload("optimizer")))
        rate, plain = moved[0] / seconds / 1e9, copy_gb_per_s("cuda", "host", 1 << 30)
        context.measure("the optimizer's way out / plain copy", rate / plain, "share", at_least=0.85)
    stop_process_group()


def owned(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Return a policy's parameters, master weights and optimizer state."""
    tensors: list[torch.Tensor] = [p.data for chunk in policy.chunks for p in chunk.module.parameters()]
    for one in policy.optimizer.chained_optimizers:
        tensors += [p.data for group in one.optimizer.param_groups for p in group["params"]]
        tensors += [value for state in one.optimizer.state.values() for value in state.values()]
    return tensors
