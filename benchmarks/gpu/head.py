"""Measures the fused head on one GPU: each mode against the floor of its matrix products, verl and Liger.

    python benchmarks/gpu/head.py           # on a GPU, about two minutes
    python benchmarks/gpu/head.py --tiny    # anywhere, seconds: shows only that the script works

N = 32768 tokens, H = 5120, V = 152064, bf16; forward and backward of -sum(A log p + 0.01 H), gradients to hidden
states and weight, the weight's in fp32 main_grad as under Megatron. The floor is 8NHV (recompute) or 6NHV (one_pass)
operations at the rate of one large matrix product, measured in the same rounds, and the expected time is
kernels/estimate.py's at that rate. The variants take turns; medians.
Liger's kernel yields a plain cross-entropy without entropy, in one pass; verl's both, recomputing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from result import figure, shown, write_result

from or1_megatron.kernels.estimate import GPUS, Mode, estimate
from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies, one_pass_loss
from or1_megatron.kernels.plan import allocation_plan

ON_GPU = torch.cuda.is_available()
ENTROPY_COEFFICIENT = 0.01


@dataclass(frozen=True)
class Size:
    tokens: int
    hidden: int
    vocabulary: int
    product_columns: int
    """The floor is the rate of a matrix product [tokens, hidden] by [hidden, product_columns]."""

    def operations(self, products: int) -> float:
        """Return the operations of this many products of the whole size."""
        return 2.0 * products * self.tokens * self.hidden * self.vocabulary


FULL = Size(32768, 5120, 152064, 16384)
TINY = Size(96, 64, 640, 320)


class Problem:
    """Inputs on the device, and the variants as passes forward and backward."""

    def __init__(self, size: Size) -> None:
        device = "cuda" if ON_GPU else "cpu"
        torch.manual_seed(0)
        options: Any = {"dtype": torch.bfloat16, "device": device}
        self.size = size
        self.hidden = torch.randn(size.tokens, size.hidden, **options).requires_grad_()
        self.weight: Any = (torch.randn(size.vocabulary, size.hidden, **options) * 0.02).requires_grad_()
        self.main_grad = torch.zeros(size.vocabulary, size.hidden, device=device)
        self.targets = torch.randint(size.vocabulary, (size.tokens,), device=device)
        self.advantages = torch.randn(size.tokens, device=device)
        self.shard = VocabularyShard(0, size.vocabulary)
        self.product_out = torch.empty(size.tokens, size.product_columns, **options)

    def variants(self, epilogues: tuple[str, ...]) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
        """Return (passes by name, why each of the others is absent)."""
        found: dict[str, Callable[[], None]] = {"product": self._product}
        for epilogue in epilogues:
            found[f"recompute, {epilogue}"] = lambda epilogue=epilogue: self._recompute(epilogue)
            found[f"one_pass, {epilogue}"] = lambda epilogue=epilogue: self._one_pass(epilogue)
        absent: dict[str, str] = {}
        for name, make in (("verl", self._verl), ("Liger", self._liger)):
            try:
                found[name] = make()
            except ImportError as error:
                absent[name] = f"not installed ({error})"
        return found, absent

    def _loss(self, log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return -(log_probs @ self.advantages[part]) - ENTROPY_COEFFICIENT * entropies.sum(), {}

    def _product(self) -> None:
        torch.mm(self.hidden.detach(), self.weight.detach()[: self.size.product_columns].t(), out=self.product_out)

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def _begin(self, into_main_grad: bool) -> None:
        self.clear()
        if into_main_grad:
            self.weight.main_grad = self.main_grad
        elif hasattr(self.weight, "main_grad"):
            del self.weight.main_grad

    def _recompute(self, epilogue: Any) -> None:
        self._begin(into_main_grad=True)
        scored = log_probs_and_entropies(self.hidden, self.weight, self.targets, 1.0, self.shard, epilogue=epilogue)
        self._loss(*scored, slice(None))[0].backward()

    def _one_pass(self, epilogue: Any) -> None:
        self._begin(into_main_grad=True)
        loss, _ = one_pass_loss(self.hidden, self.weight, self.targets, 1.0, self.shard, self._loss, epilogue=epilogue)
        loss.backward()

    def _verl(self) -> Callable[[], None]:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        def run() -> None:
            self._begin(into_main_grad=False)
            scored = linear_cross_entropy(self.hidden, self.weight, self.targets, 1.0, "none", None)
            self._loss(*scored, slice(None))[0].backward()

        return run

    def _liger(self) -> Callable[[], None]:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")

        def run() -> None:
            self._begin(into_main_grad=False)
            loss(self.weight, self.hidden, self.targets).backward()

        return run


def seconds(work: Callable[[], None]) -> float:
    if not ON_GPU:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_bytes(work: Callable[[], None], clear: Callable[[], None]) -> int:
    """Return the peak above what is allocated before, gradients included; 0 without a GPU.

    A pass that is not counted goes before: it compiles, and makes cuBLAS allocate what it keeps for good, a workspace
    (32 MiB on Hopper) for each thread that multiplies, autograd's among them. ``clear`` frees a pass's gradients.
    """
    work()
    clear()
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    problem: Problem, variants: dict[str, Callable[[], None]], rounds: int, absent: dict[str, str]
) -> dict[str, tuple[float, int]]:
    """Return median seconds and peak bytes; ``absent`` names the variants that fail at their warm-up."""
    peaks: dict[str, int] = {}
    for name, work in variants.items():
        try:
            peaks[name] = peak_bytes(work, problem.clear)
        except Exception as error:
            if name not in ("verl", "Liger"):
                raise
            absent[name] = f"failed: {type(error).__name__}: {error}"[:200]
    times: dict[str, list[float]] = {name: [] for name in peaks}
    for _ in range(rounds):
        for name in peaks:
            times[name].append(seconds(variants[name]))
    return {name: (statistics.median(times[name]), peaks[name]) for name in peaks}


def expected_s(size: Size, mode: Mode, rate: float) -> float:
    """Return the estimate for this size with an H200's SMs and memory, at the measured rate of products."""
    plan = allocation_plan(size.tokens, size.hidden, size.vocabulary, torch.bfloat16, mode)
    tile = plan.tile_tokens, plan.block_rows
    return estimate(size.tokens, size.hidden, size.vocabulary, *tile, mode, replace(GPUS["H200"], flops=rate)).seconds


def figures(size: Size, found: dict[str, tuple[float, int]], epilogue: str) -> dict[str, Any]:
    product_s = found["product"][0]
    rate = 2.0 * size.tokens * size.hidden * size.product_columns / product_s
    floors: dict[Mode, float] = {"recompute": size.operations(4) / rate, "one_pass": size.operations(3) / rate}
    ours = {mode: found[f"{mode}, {epilogue}"][0] for mode in floors}
    result: dict[str, Any] = {
        "recompute, floor / time": figure(floors["recompute"] / ours["recompute"], "share", at_least=0.85),
        "time, one_pass / recompute": figure(ours["one_pass"] / ours["recompute"], at_most=0.85),
        "one_pass, floor / time": figure(floors["one_pass"] / ours["one_pass"], "share"),
        "rate of one matrix product": figure(rate / 1e12, "TFLOP/s"),
    }
    for mode, floor in floors.items():
        result[f"floor, {mode}"] = figure(floor * 1e3, "ms")
        result[f"expected time / time, {mode}"] = figure(expected_s(size, mode, rate) / ours[mode])
    for name, (time_s, peak) in found.items():
        if name != "product":
            result[f"time, {name}"] = figure(time_s * 1e3, "ms")
            result[f"peak memory beyond inputs, {name}"] = figure(peak / 1e6, "MB")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes that run anywhere in seconds")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not arguments.tiny and not ON_GPU:
        raise SystemExit("head.py: no CUDA device is visible to PyTorch; --tiny tries the script without one")
    size = TINY if arguments.tiny else FULL
    epilogues = ("triton", "torch") if ON_GPU else ("torch",)
    problem = Problem(size)
    variants, absent = problem.variants(epilogues)
    result = figures(size, measure(problem, variants, arguments.rounds, absent), epilogues[0])
    result |= {f"time, {name}": figure(why) for name, why in absent.items()}
    settings = {"tokens": size.tokens, "hidden": size.hidden, "vocabulary": size.vocabulary, "dtype": "bfloat16"}
    path = write_result("gpu_head", result, settings | {"rounds": arguments.rounds})
    for name, entry in result.items():
        print(f"{name}: {shown(entry['value'], entry['unit'])} {entry.get('limit', '')}")
    print(path)


if __name__ == "__main__":
    main()
