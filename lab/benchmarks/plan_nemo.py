"""Compares the plan with the step times that NeMo-RL publishes for H100: held out, nothing is fitted to them.

    python lab/benchmarks/plan_nemo.py

The figures are those of docs/about/performance-summary.md of NVIDIA-NeMo/RL (v0.4, GRPO on OpenMathInstruct-2, its
on-policy rows of known architectures). Assumed: 32 responses per prompt, prompts of 128 tokens, log-normal lengths with
sigma 1 and the published mean, selective recompute, no rejected group, a reference; EP 8 for the 235B, where EP 16
spans TP too. Each plan is made three times: with the constants of configs/hardware/h100.yaml, which are those fitted to
the paper's H800 runs; without ``other``; and with the lighter engine that docs/planning.md assumes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from or1_megatron.config.hardware import read_hardware
from or1_megatron.config.load import load_config
from or1_megatron.config.recipes import named
from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Drawn, Moment
from or1_megatron.plan.step_time import Machine, step_time
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape
from or1_megatron.weights.table import Experts

PROMPT_TOKENS: Final = 128
FAST_S: Final = (4.8e-3, 1.0e-4)
"""A lighter engine: the 7B's iteration_s, and a tenth of a millisecond per response."""


@dataclass(frozen=True)
class Row:
    """One row of the published table."""

    model: str
    longest: int
    mean: int
    gpus: int
    responses: int
    engine_tensor: int
    layout: dict[str, Any]
    step_s: float


ROWS: Final = (
    Row("Llama-3.1-8B", 4096, 1060, 16, 2048, 1, {"tensor": 1, "pipeline": 2}, 97.7),
    Row("Qwen3-32B", 4096, 3206, 32, 2048, 4, {"tensor": 4, "pipeline": 4}, 393.0),
    Row("Qwen3-30B-A3B", 4096, 3154, 32, 2048, 4, {"tensor": 2, "expert": 8}, 225.0),
    Row("Qwen3-235B-A22B", 8192, 5671, 128, 512, 16, {"tensor": 2, "context": 2, "pipeline": 8, "expert": 8,
        "layers_per_stage": [12, 12, 12, 12, 12, 12, 11, 11]}, 506.0),
)  # fmt: skip
SHAPES: Final = {
    "Llama-3.1-8B": Shape(32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
    "Qwen3-32B": Shape(64, 5120, 25600, 64, 8, 128, 151936, 40960, False),
    "Qwen3-30B-A3B": Shape(
        48, 2048, 6144, 32, 4, 128, 151936, 40960, False, Experts(128, 8, 768, True, tuple(range(48)))
    ),
}


@dataclass(frozen=True)
class PublishedMean:
    """Log-normal lengths with sigma 1, cut, with a given mean."""

    mean: float
    kept_share: float = 1.0
    source: str = "a published mean"

    def draw(self, when: Moment, prompts: int, group_size: int, limit: int, random: np.random.Generator) -> Drawn:
        spread = np.exp(random.standard_normal(prompts * group_size))
        low, high = 1.0, 1e6
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if np.minimum(middle * spread, limit).mean() < self.mean else (low, middle)
        return np.full(prompts, PROMPT_TOKENS), np.clip(low * spread, 1, limit).astype(np.int64)


def config_of(row: Row) -> Config:
    groups = row.responses // 32
    stage = (
        f"{{name: '1', steps: 1, max_response_tokens: {row.longest - PROMPT_TOKENS}, prompts_per_step: {groups}, "
        f"prompts_per_update: 16, group_size: 32}}"
    )
    tensor = str(row.layout["tensor"] > 1).lower()
    keys = [f"parallel.{key}={value}" for key, value in row.layout.items()]
    return load_config(
        named("recipe")["or1_7b"],
        [
            f"stages=[{stage}]", "evaluate.data=[]", f"data.max_prompt_tokens={PROMPT_TOKENS}",
            f"parallel.ranks={row.gpus}", "parallel.recompute=selective", f"parallel.sequence={tensor}",
            f"parallel.micro_batch_tokens={row.longest * 3 // 2}", *keys, "algorithm.kl.reference=m",
            f"rollout.engines={row.gpus // row.engine_tensor}", f"rollout.tensor_parallel={row.engine_tensor}",
            "rollout.max_concurrent=512",
            "verify.workers=64",
        ],
    )  # fmt: skip


def machine_for(row: Row) -> Machine:
    shape = SHAPES.get(row.model) or Shape.of(read_hf_config(named("shape")["qwen3_235b_a22b"]))
    return Machine.of(read_hardware("h100"), shape, "cuda")


def planned_s(row: Row, machine: Machine) -> float:
    config = config_of(row)
    when, lengths = Moment(config.stages, 0, 0), PublishedMean(row.mean - PROMPT_TOKENS)
    return step_time(config, machine, lengths, when, 0.0, np.random.default_rng(1)).seconds


def main() -> None:
    print("| model | GPUs | published, s | plan, s | error | without `other` | error | and a lighter engine | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        machine = machine_for(row)
        hidden = replace(machine, rates=replace(machine.rates, other_response_s=0.0), covers=())
        light = replace(hidden, rates=replace(hidden.rates, iteration_s=FAST_S[0], request_s=FAST_S[1]))
        took = [planned_s(row, each) for each in (machine, hidden, light)]
        shown = [f"{seconds:.0f} | {seconds / row.step_s - 1:+.0%}" for seconds in took]
        print(f"| {row.model} | {row.gpus} | {row.step_s:.0f} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
