"""Measures forward, backward and optimizer step of a policy on one device: tokens per second, MFU, peak memory.

    python benchmarks/gpu/policy.py            # on a GPU, minutes
    python benchmarks/gpu/policy.py --tiny     # anywhere, seconds: shows only that the script works

Random Qwen2 models in bf16 with fp32 master weights and our own layers, at each preset of recomputation and with each
form of the head. They do not fit into memory together, so each is measured by itself, between two runs of one matrix
product, whose rate shows whether the device kept its pace.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_models import batch_of, flops, long_responses, make_policy, one_rank, random_qwen2, sync
from result import figure, write_result

from or1_megatron.parallel.mesh import Mesh, stop_process_group
from or1_megatron.rl.loss import ClippedPolicyLoss

VARIANTS = [("none", "recompute"), ("selective", "recompute"), ("full", "recompute"), ("none", "one_pass")]
DATASHEET_TFLOPS = {"A100": 312.0, "H100": 989.0, "H800": 989.0, "H200": 989.0}
"""Dense bf16 rates of the SXM cards."""


def matmul_tflops(size: int) -> float:
    """Return the bf16 rate of one square matrix product: the ceiling on this device, now."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    sync()
    started_s = time.perf_counter()
    for _ in range(10):
        a @ b
    sync()
    return 10 * 2 * size**3 / (time.perf_counter() - started_s) / 1e12


def measure(hf: Path, mesh: Mesh, lengths: list[int], row_tokens: int, updates: int, **parallel: Any) -> dict[str, Any]:
    """Make a policy; return the median seconds of an update, and peak bytes."""
    policy = make_policy(hf, mesh, micro_batch_tokens=row_tokens, **parallel)
    batch = batch_of(lengths, row_tokens, policy.hf["vocab_size"])
    objective = ClippedPolicyLoss(0.2, 0.2, 0.01, 1.0, on_policy=True)
    seconds = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + updates):
        sync()
        started_s = time.perf_counter()
        policy.update(batch.ranks[0], objective, batch.token_count)
        sync()
        seconds.append(time.perf_counter() - started_s)
    return {"seconds": statistics.median(seconds[1:]), "peak_bytes": torch.cuda.max_memory_allocated()}


def figures_of(name: str, measured: dict[str, Any], work: float, tokens: int, matmul: float) -> dict[str, Any]:
    """Return one row of the table; ``work`` in FLOPs per update, ``matmul`` in TFLOP/s."""
    rate = work / measured["seconds"] / 1e12
    found = {
        "update": figure(measured["seconds"], "s"),
        "tokens per second": figure(tokens / measured["seconds"]),
        "model FLOPs / a matrix product's": figure(rate / matmul, "share"),
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_name()
        for known, datasheet in DATASHEET_TFLOPS.items():
            if known in card:
                found["MFU"] = figure(rate / datasheet, "share")
        found["peak memory"] = figure(measured["peak_bytes"] / 2**30, "GiB")
    return {f"{name}: {column}": value for column, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a machine without a GPU")
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=4, help="micro-batches per update")
    parser.add_argument("--updates", type=int, default=5, help="timed updates, after one that is not")
    arguments = parser.parse_args()
    row_tokens, updates = (64, 1) if arguments.tiny else (arguments.row_tokens, arguments.updates)
    lengths = long_responses(arguments.rows * row_tokens * 15 // 16, row_tokens)
    mesh = one_rank()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in ["tiny"] if arguments.tiny else ["0.5B", "1.5B"]:
            hf = random_qwen2(shape, Path(folder))
            for recompute, head in VARIANTS:
                name = f"{shape}, recompute {recompute}, head {head}"
                before = matmul_tflops(256 if arguments.tiny else 8192)
                try:
                    measured = measure(hf, mesh, lengths, row_tokens, updates, recompute=recompute, head=head)
                except torch.cuda.OutOfMemoryError:
                    figures[f"{name}: update"] = figure("out of memory")
                    measured = None
                gc.collect()  # the policy's reference cycles hold its memory
                torch.cuda.empty_cache()
                if measured is not None:
                    matmul = (before + matmul_tflops(256 if arguments.tiny else 8192)) / 2
                    figures |= figures_of(name, measured, flops(shape, lengths), sum(lengths), matmul)
                print(name, measured, flush=True)
    settings = {"row tokens": row_tokens, "responses": len(lengths), "tokens per update": sum(lengths)}
    print(write_result("gpu_policy", figures, {**settings, "timed updates": updates}))
    stop_process_group()


if __name__ == "__main__":
    main()
