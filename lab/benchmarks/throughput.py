"""Forward, backward and optimizer step of a policy on one GPU: tokens per second, MFU, peak memory.

    python lab/benchmarks/throughput.py

Random Qwen2 models in bf16 with fp32 master weights and our own layers, by recomputation and form of the head.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from result import figure, write_result

from or1_megatron.config.hardware import hardware_of
from or1_megatron.parallel.mesh import Mesh, stop_process_group
from or1_megatron.rl.packing import SequenceCost
from or1_megatron.selftest.models import OBJECTIVE, batch_of, make_policy, one_rank, random_qwen2
from or1_megatron.selftest.timing import seconds_of
from or1_megatron.weights.shape import Shape

ROW_TOKENS: Final = 16384
VARIANTS: Final = [("none", "recompute"), ("selective", "recompute"), ("full", "recompute"), ("none", "one_pass")]


def lengths_of(row_tokens: int) -> list[int]:
    """Return log-normal lengths, like those of long-CoT rollouts, of sequences that fill four rows of this size."""
    rng, sigma, lengths = np.random.default_rng(1), 0.8, list[int]()
    while (left := 4 * row_tokens * 15 // 16 - sum(lengths)) > 16:
        drawn = rng.lognormal(np.log(row_tokens / 4) - sigma**2 / 2, sigma)
        lengths.append(int(min(max(drawn, 16), row_tokens, left)))
    return lengths


def measure(hf: Path, mesh: Mesh, name: str, **parallel: Any) -> dict[str, Any]:
    """Make a policy and update it four times; return its figures, of which the first update has no part."""
    policy = make_policy(hf, mesh, micro_batch_tokens=ROW_TOKENS, **parallel)
    lengths = lengths_of(ROW_TOKENS)
    batch = batch_of(lengths, ROW_TOKENS, policy.hf["vocab_size"])
    torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(lambda: policy.update(batch.ranks[0], OBJECTIVE, batch.token_count)) for _ in range(4)]
    seconds, shape = float(np.median(times[1:])), Shape.of(policy.hf)
    cost = SequenceCost.of_decoder(shape.multiplied_weights, shape.attention_width)
    flops = 3 * sum(cost.linear * length + cost.quadratic * length**2 for length in lengths)
    card = hardware_of(torch.cuda.get_device_name())
    return {
        f"{name}: update": figure(seconds, "s"),
        f"{name}: tokens per second": figure(sum(lengths) / seconds),
        f"{name}: MFU": figure(flops / seconds / card.bf16_flops.value if card else 0.0, "share"),
        f"{name}: peak memory": figure(torch.cuda.max_memory_allocated() / 2**30, "GiB"),
    }


def main() -> None:
    figures: dict[str, Any] = {}
    mesh = one_rank()
    with tempfile.TemporaryDirectory() as folder:
        for size in ("0.5B", "1.5B"):
            hf = random_qwen2(size, Path(folder))
            for kind, head in VARIANTS:
                figures |= measure(hf, mesh, f"{size}, recompute {kind}, head {head}", recompute=kind, head=head)
                gc.collect()  # the policy's reference cycles hold its memory
                torch.cuda.empty_cache()
    stop_process_group()
    write_result("throughput", figures, {"row_tokens": ROW_TOKENS, "layers": "own"})


if __name__ == "__main__":
    main()
