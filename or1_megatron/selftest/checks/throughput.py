"""Forward, backward and optimizer step of a policy on one device: tokens per second, MFU, peak memory.

Random Qwen2 models in bf16 with fp32 master weights and our own layers, at each preset of recomputation and with each
form of the head. They do not fit into memory together, so each is measured by itself, between two runs of one matrix
product, whose rate shows whether the device kept its pace.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from or1_megatron.config.hardware import hardware_of
from or1_megatron.parallel.mesh import Mesh, stop_process_group
from or1_megatron.rl.packing import SequenceCost
from or1_megatron.selftest.models import OBJECTIVE, batch_of, make_policy, one_rank, random_qwen2
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.timing import matmul_tflops, seconds_of
from or1_megatron.weights.shape import Shape

ROW_TOKENS: Final = 16384
VARIANTS: Final = [("none", "recompute"), ("selective", "recompute"), ("full", "recompute"), ("none", "one_pass")]


def measure(hf: Path, mesh: Mesh, lengths: list[int], row_tokens: int, updates: int, **parallel: Any) -> dict[str, Any]:
    """Make a policy; return the median seconds of an update, and peak bytes."""
    policy = make_policy(hf, mesh, micro_batch_tokens=row_tokens, **parallel)
    batch = batch_of(lengths, row_tokens, policy.hf["vocab_size"])
    torch.cuda.reset_peak_memory_stats()

    def update() -> object:
        return policy.update(batch.ranks[0], OBJECTIVE, batch.token_count)

    seconds = [seconds_of(update) for _ in range(1 + updates)]
    shape = Shape.of(policy.hf)
    cost = SequenceCost.of_decoder(shape.multiplied_weights, shape.attention_width)
    return {
        "seconds": statistics.median(seconds[1:]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "flops": 3 * sum(cost.linear * length + cost.quadratic * length**2 for length in lengths),
    }


def lengths_of(row_tokens: int) -> list[int]:
    """Return the lengths of the sequences of one update, which fill four rows of so many tokens: log-normal, like
    those of long-CoT rollouts."""
    rng, sigma, lengths = np.random.default_rng(1), 0.8, list[int]()
    while (left := 4 * row_tokens * 15 // 16 - sum(lengths)) > 16:
        drawn = rng.lognormal(np.log(row_tokens / 4) - sigma**2 / 2, sigma)
        lengths.append(int(min(max(drawn, 16), row_tokens, left)))
    return lengths


def note(context: Context, name: str, measured: dict[str, Any], tokens: int, matmul: float) -> None:
    """Note one row of the table; ``matmul`` in TFLOP/s."""
    rate = measured["flops"] / measured["seconds"] / 1e12
    context.measure(f"{name}: update", measured["seconds"], "s")
    context.measure(f"{name}: tokens per second", tokens / measured["seconds"])
    context.measure(f"{name}: model FLOPs / a matrix product's", rate / matmul, "share")
    if context.machine.cuda:
        if (card := hardware_of(torch.cuda.get_device_name())) is not None:
            context.measure(f"{name}: MFU", rate * 1e12 / card.bf16_flops.value, "share")
        context.measure(f"{name}: peak memory", measured["peak_bytes"] / 2**30, "GiB")


def throughput(context: Context) -> None:
    """Measure; on CPU a tiny model, which shows only that this works."""
    cuda = context.machine.cuda
    row_tokens, updates, size = (ROW_TOKENS, 3, 8192) if cuda else (64, 1, 256)
    lengths = lengths_of(row_tokens)
    mesh = one_rank()
    for shape in ["0.5B", "1.5B"] if cuda else ["tiny"]:
        hf = random_qwen2(shape, context.folder)
        for recompute, head in VARIANTS:
            name = f"{shape}, recompute {recompute}, head {head}"
            before = matmul_tflops(size)
            try:
                measured = measure(hf, mesh, lengths, row_tokens, updates, recompute=recompute, head=head)
            except torch.cuda.OutOfMemoryError:
                context.measure(f"{name}: update", "out of memory")
                measured = None
            gc.collect()  # the policy's reference cycles hold its memory
            torch.cuda.empty_cache()
            if measured is not None:
                matmul = (before + matmul_tflops(size)) / 2
                note(context, name, measured, sum(lengths), matmul)
    stop_process_group()
