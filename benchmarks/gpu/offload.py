"""Measures offload of parameters and optimizer state: GB/s against a plain copy, bytes freed, bit-exactness.

    python benchmarks/gpu/offload.py            # on a GPU, about a minute
    python benchmarks/gpu/offload.py --tiny     # anywhere, seconds: shows only that the script works

The plain copy moves as many bytes between 1 GiB of page-locked memory and 1 GiB on the device, in turn with ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_models import batch_of, make_policy, one_rank, random_qwen2, sync
from result import figure, write_result

from or1_megatron.parallel.mesh import stop_process_group
from or1_megatron.parallel.offload import Offload, Thing
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.rl.loss import ClippedPolicyLoss

PIECE_BYTES = 1 << 30


def timed(move: Callable[[], int]) -> tuple[float, int]:
    """Return (seconds, bytes) of one move."""
    sync()
    started_s = time.perf_counter()
    moved = move()
    sync()
    return time.perf_counter() - started_s, moved


class PlainCopy:
    """Copies between a piece of page-locked memory and one on the device, until all bytes are copied."""

    def __init__(self, piece_bytes: int) -> None:
        pinned = torch.cuda.is_available()
        self._host = torch.zeros(piece_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(piece_bytes, dtype=torch.uint8, device="cuda" if pinned else "cpu")

    def out(self, total: int) -> int:
        return self._copy(self._host, self._device, total)

    def back(self, total: int) -> int:
        return self._copy(self._device, self._host, total)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, total: int) -> int:
        for start in range(0, total, to.numel()):
            n = min(to.numel(), total - start)
            to[:n].copy_(source[:n], non_blocking=True)
        return total


def free_bytes() -> int:
    """Return the free bytes of the device; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def trained(policy: MegatronPolicy) -> MegatronPolicy:
    """Update once, so that there are moments to move."""
    batch = batch_of([48, 32, 40], 64, policy.hf["vocab_size"])
    policy.update(batch.ranks[0], ClippedPolicyLoss(0.2, 0.2, 0.01, 1.0, on_policy=True), batch.token_count)
    return policy


def owned(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Return parameters and the optimizer's tensors."""
    tensors = [p.data for chunk in policy.chunks for p in chunk.module.parameters()]
    for one in policy.optimizer.chained_optimizers:
        tensors += [p.data for group in one.optimizer.param_groups for p in group["params"]]
        tensors += [value for state in one.optimizer.state.values() for value in state.values()]
    return tensors


def first_turn(policy: MegatronPolicy, offload: Offload) -> dict[str, Any]:
    """Move everything out, which also allocates page-locked memory, and back; return bytes and exactness."""
    kept = [tensor.cpu() for tensor in owned(policy)]
    torch.cuda.empty_cache()
    free = free_bytes()
    seconds, held = timed(lambda: offload.offload("parameters", "optimizer"))
    held += offload.offload("gradients")
    freed = free_bytes() - free
    offload.restore("parameters", "gradients", "optimizer")
    exact = all(torch.equal(a, b.cpu()) for a, b in zip(kept, owned(policy), strict=True))
    return {"seconds": seconds, "held": held, "freed": freed, "exact": exact}


def rates(offload: Offload, plain: PlainCopy, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return, by thing and direction, GB/s of (its move, a plain copy of as many bytes) for each round."""
    found: dict[str, list[tuple[float, float]]] = {}
    things: tuple[Thing, ...] = ("parameters", "optimizer")
    for _ in range(rounds):
        for thing in things:
            for way, move, copy in (("offload", offload.offload, plain.out), ("restore", offload.restore, plain.back)):
                seconds, moved = timed(partial(move, thing))
                plain_seconds, _ = timed(partial(copy, moved))
                found.setdefault(f"{thing} {way}", []).append((moved / seconds / 1e9, moved / plain_seconds / 1e9))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a machine without a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    shape = "tiny" if arguments.tiny else "1.5B"
    mesh = one_rank()
    with tempfile.TemporaryDirectory() as folder:
        policy = trained(make_policy(random_qwen2(shape, Path(folder)), mesh, micro_batch_tokens=256))
    offload = Offload(policy.chunks, policy.optimizer)
    first = first_turn(policy, offload)
    by_move = rates(offload, PlainCopy(1 << 20 if arguments.tiny else PIECE_BYTES), arguments.rounds)
    figures: dict[str, Any] = {"bit-exact": figure(first["exact"])}
    for name, rounds in by_move.items():
        figures[name] = figure(statistics.median(ours for ours, _ in rounds), "GB/s")
        ratio = statistics.median(ours / plain for ours, plain in rounds)
        figures[f"{name} / plain copy"] = figure(ratio, "share", at_least=0.85)
    figures["parameters, gradients and optimizer"] = figure(first["held"] / 2**30, "GiB")
    if torch.cuda.is_available():
        figures["freed on the device / held"] = figure(first["freed"] / first["held"], "share", at_least=0.98)
    figures["first time out, page-locking included"] = figure(first["seconds"], "s")
    print(write_result("gpu_offload", figures, {"model": shape, "dtype": "bfloat16", "rounds": arguments.rounds}))
    stop_process_group()


if __name__ == "__main__":
    main()
