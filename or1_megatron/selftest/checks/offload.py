"""Offload of parameters, gradients and optimizer state: bit-exactness, bytes freed, GB/s against a plain copy.

Plain copies of a piece of page-locked memory, in turn with ours, show what the link carries.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from or1_megatron.parallel.mesh import stop_process_group
from or1_megatron.parallel.offload import Offload, Part
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.selftest.models import OBJECTIVE, batch_of, make_policy, one_rank, random_qwen2
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.timing import copy_gb_per_s, free_bytes, seconds_of

PIECE_BYTES = 1 << 30


def timed(move: Callable[[], int]) -> tuple[float, int]:
    """Return (seconds, bytes) of one move."""
    moved: list[int] = []
    seconds = seconds_of(lambda: moved.append(move()))
    return seconds, moved[0]


def trained(policy: MegatronPolicy) -> MegatronPolicy:
    """Update once, so that there are moments to move."""
    batch = batch_of([48, 32, 40], 64, policy.hf["vocab_size"])
    policy.update(batch.ranks[0], OBJECTIVE, batch.token_count)
    return policy


def owned(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Return parameters and the optimizer's tensors."""
    tensors: list[torch.Tensor] = [p.data for chunk in policy.chunks for p in chunk.module.parameters()]
    for one in policy.optimizer.chained_optimizers:
        tensors += [p.data for group in one.optimizer.param_groups for p in group["params"]]
        tensors += [value for state in one.optimizer.state.values() for value in state.values()]
    return tensors


def first_turn(policy: MegatronPolicy, offload: Offload) -> dict[str, Any]:
    """Move everything out, which also allocates page-locked memory, and back; return bytes and exactness."""
    kept = [tensor.clone() for tensor in owned(policy)]
    torch.cuda.empty_cache()
    free = free_bytes()
    seconds, held = timed(lambda: offload.offload("parameters", "optimizer"))
    held += offload.offload("gradients")
    freed = free_bytes() - free
    offload.restore("parameters", "gradients", "optimizer")
    exact = all(torch.equal(a, b) for a, b in zip(kept, owned(policy), strict=True))
    return {"seconds": seconds, "held": held, "freed": freed, "exact": exact}


def rates(mover: Offload, piece_bytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return, by thing and direction, GB/s of (its move, plain copies of a piece) for each round."""
    device, host = ("cuda", "host") if torch.cuda.is_available() else ("cpu", "cpu")
    ways = (("offload", mover.offload, (device, host)), ("restore", mover.restore, (host, device)))
    things: tuple[Part, ...] = ("parameters", "optimizer")
    by_move: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for thing, (way, move, ends) in product(things, ways):
            seconds, moved = timed(partial(move, thing))
            plain = copy_gb_per_s(*ends, piece_bytes, times=3)
            by_move.setdefault(f"{thing} {way}", []).append((moved / seconds / 1e9, plain))
    return by_move


def offload(context: Context) -> None:
    """Move a policy's state out and back; on CPU the device's memory is the host's, and nothing can come free."""
    cuda, rounds = context.machine.cuda, 5 if context.long else 2
    large = context.long and free_bytes() > 64 << 30  # its state of 30 GiB, and a copy of most of it
    shape = "tiny" if not cuda else "1.5B" if large else "0.5B"
    policy = trained(make_policy(random_qwen2(shape, context.folder), one_rank(), micro_batch_tokens=256))
    context.measure("model", shape)
    mover = Offload(policy.chunks, policy.optimizer)
    first = first_turn(policy, mover)
    context.require("bit-exact", first["exact"])
    if cuda:
        context.require("freed on the device / held", first["freed"] / first["held"], "share", at_least=0.95)
    by_move = rates(mover, PIECE_BYTES if cuda else 1 << 20, rounds)
    for name, moves in by_move.items():
        context.measure(name, statistics.median(ours for ours, _ in moves), "GB/s")
        if cuda:
            ratio = statistics.median(ours / plain for ours, plain in moves)
            context.measure(f"{name} / plain copy", ratio, "share", at_least=0.85)
    context.measure("parameters, gradients and optimizer", first["held"] / 2**30, "GiB")
    context.measure("first time out, page-locking included", first["seconds"], "s")
    stop_process_group()
