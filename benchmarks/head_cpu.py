"""Measures the head on the CPU: time and peak memory of its modes beside plain autograd on all logits.

    python benchmarks/head_cpu.py [--rounds 5]

N = 4096 tokens, H = 512, V = 32768, fp32, one thread; forward and backward of a clipped policy loss with an entropy
bonus, gradients to hidden states and weight. Time: one process, the variants in turn within each round, medians over
the rounds of CPU time and of wall time; CPU time is the one to read where other work shares the machine. Memory: each
variant in a fresh process, the peak of its resident set above what it held before the pass (VmHWM, Linux).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from result import figure, shown, write_result
from torch import Tensor

from or1_megatron.interfaces import TokenInputs
from or1_megatron.kernels.head import (
    VocabularyShard,
    log_probs_and_entropies,
    one_pass_loss,
    reference_log_probs_and_entropies,
)
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss

TOKENS, HIDDEN, VOCABULARY = 4096, 512, 32768
VARIANTS = ("materialised", "recompute", "one_pass")


class Problem:
    """Inputs of one pass, and the pass in each variant."""

    def __init__(self, entropy_coefficient: float) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(TOKENS, HIDDEN).requires_grad_()
        self.weight = (torch.randn(VOCABULARY, HIDDEN) * 0.05).requires_grad_()
        self.targets = torch.randint(VOCABULARY, (TOKENS,))
        self.inputs = TokenInputs(torch.randn(TOKENS), torch.full((TOKENS,), -10.0))
        self.objective = ClippedPolicyLoss(
            0.2, 0.28, entropy_coefficient=entropy_coefficient, temperature=1.0, on_policy=True
        )
        self.shard = VocabularyShard(0, VOCABULARY)

    def _pointwise(self, log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = self.objective(log_probs, entropies, self.inputs[part])
        return loss, dict(sums)

    def run(self, variant: str) -> None:
        """Forward and backward."""
        self.hidden.grad = self.weight.grad = None
        if variant == "materialised":
            scored = reference_log_probs_and_entropies(self.hidden, self.weight, self.targets, 1.0)
            loss, _ = self._pointwise(*scored, slice(None))
        elif variant == "recompute":
            scored = log_probs_and_entropies(self.hidden, self.weight, self.targets, 1.0, self.shard)
            loss, _ = self._pointwise(*scored, slice(None))
        else:
            loss, _ = one_pass_loss(self.hidden, self.weight, self.targets, 1.0, self.shard, self._pointwise)
        loss.backward()


def peak_bytes(variant: str) -> int:
    """Return the peak of a pass in this process, above the resident set before it."""

    def kilobytes(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    problem = Problem(entropy_coefficient=0.01)
    torch.mm(torch.randn(512, 512), torch.randn(512, 512))  # the GEMM library's own buffers
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kilobytes("VmRSS")
    problem.run(variant)
    return (kilobytes("VmHWM") - before) * 1024


def times(problem: Problem, rounds: int) -> dict[str, dict[str, float]]:
    """Return median CPU and wall seconds of each variant, measured in turn."""
    found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:
        problem.run(variant)
    for number in range(rounds):
        for variant in VARIANTS if number % 2 else reversed(VARIANTS):
            cpu, wall = time.process_time(), time.perf_counter()
            problem.run(variant)
            found[variant].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        variant: {"cpu": statistics.median(c for c, _ in pairs), "wall": statistics.median(w for _, w in pairs)}
        for variant, pairs in found.items()
    }


def ratio(seconds: dict[str, dict[str, float]], a: str, b: str, clock: str) -> float:
    return seconds[a][clock] / seconds[b][clock]


def figures(peaks: dict[str, int], with_bonus: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """Limits apply to the loss with an entropy bonus, to CPU time, and to the mode that needs more memory."""
    largest = max(peaks[variant] for variant in VARIANTS[1:])
    found: dict[str, Any] = {
        "peak extra memory / materialised": figure(largest / peaks["materialised"], at_most=0.125),
        "time / materialised, forward and backward": figure(
            ratio(with_bonus, "recompute", "materialised", "cpu"), at_most=1.05
        ),
        "time, one_pass / recompute": figure(ratio(with_bonus, "one_pass", "recompute", "cpu"), at_most=0.85),
    }
    for name, seconds in (("", with_bonus), (", no entropy bonus", without)):
        for a, b in (("recompute", "materialised"), ("one_pass", "recompute")):
            for clock in ("cpu", "wall"):
                found[f"{clock} time, {a} / {b}{name}"] = figure(ratio(seconds, a, b, clock))
        for variant in VARIANTS:
            found[f"CPU time, {variant}{name}"] = figure(seconds[variant]["cpu"], "s")
    for variant in VARIANTS:
        found[f"peak extra memory, {variant}"] = figure(peaks[variant] / 1e6, "MB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=VARIANTS, help="print this variant's peak bytes and end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(peak_bytes(arguments.memory))
        return
    peaks = {
        variant: int(subprocess.check_output([sys.executable, __file__, "--memory", variant])) for variant in VARIANTS
    }
    with_bonus, without = (times(Problem(coefficient), arguments.rounds) for coefficient in (0.01, 0.0))
    found = figures(peaks, with_bonus, without)
    settings = {"tokens": TOKENS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "dtype": "float32", "threads": 1}
    path = write_result("head_cpu", found, settings | {"rounds": arguments.rounds})
    for name, entry in found.items():
        print(f"{name}: {shown(entry['value'], entry['unit'])} {entry.get('limit', '')}")
    print(path)


if __name__ == "__main__":
    main()
