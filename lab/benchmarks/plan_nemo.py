"""Fits the plan's constants for H100 to published figures of today's systems, and compares the plan with all of them.

    python lab/benchmarks/plan_nemo.py          # every row: published, planned, error
    python lab/benchmarks/plan_nemo.py --fit    # the constants of configs/hardware/h100.yaml again

Steps: docs/about/performance-summary.md of NVIDIA-NeMo/RL (v0.5 and v0.6, GRPO on OpenMathInstruct-2, H100, bf16).
Its recipes (examples/configs/recipes/llm/performance) give groups of 32, SGD steps of 512 responses, rows of T tokens,
recomputation, the nodes that train and the nodes that decode. **Every second row, in the published order, is held
out**; this rule was written down before anything was fitted. DeepSeek-V3 is left out, because the plan does not know
the shape of its attention (MLA).

Decoding: vLLM's blog of 2026-04-22 (Llama-3.1-8B) and the performance lab of gpustack (Qwen3-32B).

Assumptions: prompts of 128 tokens; log-normal lengths with sigma 1, cut at T, with the published mean; no rejected
group; a KV cache by gpu_memory_utilization 0.6, or 0.8 for engines on their own GPUs. NeMo-RL uses asynchronous engines
for 1-off, 8-off and the 235B. They decode 128 responses at once, vLLM's default (NeMo-RL#4221), other engines up to
1,024. The 235B's 512 responses are planned as two SGD steps, so that the plan counts the pass for log-probs that
NeMo-RL makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import numpy as np
from plan_paper import fit

from or1_megatron.config.hardware import read_hardware
from or1_megatron.config.load import load_config
from or1_megatron.config.recipes import named
from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Drawn, Moment
from or1_megatron.plan.rollout_time import engine_clock
from or1_megatron.plan.step_time import Machine, Steps, StepTime
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape
from or1_megatron.weights.table import Experts

PROMPT_TOKENS: Final = 128
TRUE_GB: Final = 85.5
"""Memory of an H100 by CUDA (79.6 GiB), of which vLLM takes its share. The hardware file has 80 GB."""


@dataclass(frozen=True)
class Row:
    """One row of the published table."""

    model: str
    off: int
    """How many steps old a sample may be."""
    longest: int
    mean: int
    train: int
    """Number of GPUs that train. With ``off`` 0 the same GPUs also decode."""
    decode: int
    responses: int
    engine_tensor: int
    step_s: float
    layout: dict[str, Any] = field(default_factory=dict)
    at_once: int = 1024

    @property
    def gpus(self) -> int:
        return self.train + (self.decode if self.off else 0)


WIDE: Final = {"pipeline": 8, "layers_per_stage": [11, 12, 12, 12, 12, 12, 12, 11], "recompute": "full"}
TURN_S: Final = 16.43
"""Fitted: the seconds that an on-policy step of NeMo-RL takes in addition to the plan, because its trainer and engines
take turns on the same GPUs. It is no constant of the hardware: our own moves ran at the speed of plain copies."""
ACROSS: Final = {"tensor": 2, "context": 2}
ROWS: Final = (
    Row("Llama-3.1-8B", 0, 4096, 1019, 16, 16, 2048, 1, 92.8, {"pipeline": 2, "recompute": "full"}),
    Row("Llama-3.1-8B", 1, 4096, 1123, 8, 8, 2048, 1, 64.8, {"recompute": "full"}, 128),
    Row("Qwen3-32B", 0, 4096, 3251, 32, 32, 2048, 4, 376, {"tensor": 4, "pipeline": 4}),
    Row("Qwen3-32B", 1, 4096, 3252, 32, 32, 2048, 4, 200, {"tensor": 4, "pipeline": 4}, 128),
    Row("Qwen3-30B-A3B", 0, 4096, 3203, 32, 32, 2048, 2, 192, {"expert": 8}),
    Row("Qwen3-30B-A3B", 1, 4096, 3201, 16, 16, 2048, 2, 152, {"expert": 8, "pipeline": 2}, 128),
    Row("Qwen3-30B-A3B", 8, 4096, 3206, 128, 64, 2048, 2, 34.5, {"expert": 8}, 128),
    Row("Qwen3-235B-A22B", 0, 8192, 5698, 128, 128, 512, 16, 395, {**WIDE, **ACROSS, "expert": 8}, 128),
    Row("Qwen3-235B-A22B", 0, 8192, 5713, 256, 256, 512, 16, 312, {**WIDE, **ACROSS, "expert": 16}, 128),
    Row("Qwen3-235B-A22B", 1, 8192, 5721, 128, 128, 512, 8, 231, {"tensor": 4, "expert": 4, **WIDE}, 128),
)  # fmt: skip
SHAPES: Final = {
    "Llama-3.1-8B": Shape(32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
    "Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151936, 40960, False),
    "Qwen3-32B": Shape(64, 5120, 25600, 64, 8, 128, 151936, 40960, False),
    "Qwen3-30B-A3B": Shape(
        48, 2048, 6144, 32, 4, 128, 151936, 40960, False, Experts(128, 8, 768, True, tuple(range(48)))
    ),
}
DECODING: Final = (
    ("Llama-3.1-8B", 1, 1, 0, 6.44),
    ("Llama-3.1-8B", 1, 1, 100_000, 6.44 + 4.37),
    ("Llama-3.1-8B", 1, 8, 8 * 21_000, 15.2),
    ("Qwen3-32B", 1, 1, 1_000, 43.0),
    ("Qwen3-32B", 1, 118, 118_000, 50.2),
    ("Qwen3-8B", 4, 64, 64_000, 14.5),
)
"""(model, TP, responses, tokens of context, ms of an iteration). Contexts of 1,000 tokens are assumed; 14.5 ms is the
middle of what was published, 11 to 18 ms."""


@dataclass(frozen=True)
class PublishedMean:
    """Log-normal lengths with sigma 1, cut at T, with a given mean."""

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
        f"prompts_per_update: {min(16, groups // 2)}, group_size: 32}}"
    )
    layout: dict[str, Any] = {"tensor": 1, "pipeline": 1, "recompute": "none"} | row.layout
    keys = [f"parallel.{key}={value}" for key, value in layout.items()]
    own = [f"rollout.max_staleness={row.off}", "rollout.placement=separate"]
    share = (0.8 if row.off else 0.6) * TRUE_GB / 80
    return load_config(
        named("recipe")["or1_7b"],
        [
            f"stages=[{stage}]", "evaluate.data=[]", f"data.max_prompt_tokens={PROMPT_TOKENS}",
            f"parallel.ranks={row.train}", f"parallel.sequence={str(layout['tensor'] > 1).lower()}",
            f"parallel.micro_batch_tokens={row.longest}", "parallel.head=one_pass", *keys,
            "algorithm.kl.reference=m", "cluster.gpu_memory_gb=null", f"rollout.gpu_memory_fraction={share}",
            f"rollout.engines={row.decode // row.engine_tensor}", f"rollout.tensor_parallel={row.engine_tensor}",
            f"rollout.max_concurrent={row.at_once}", "verify.workers=64", *(own if row.off else []),
        ],
    )  # fmt: skip


def shape_of(model: str) -> Shape:
    return SHAPES.get(model) or Shape.of(read_hf_config(named("shape")["qwen3_235b_a22b"]))


def machine_for(model: str, **changed: float) -> Machine:
    machine = Machine.of(read_hardware("h100"), shape_of(model), "cuda")
    return replace(machine, rates=replace(machine.rates, **changed))


def planned(row: Row, machine: Machine) -> StepTime:
    config = config_of(row)
    when, lengths = Moment(config.stages, 0, 0), PublishedMean(row.mean - PROMPT_TOKENS)
    return Steps(config, machine, lengths, when, 0.0, np.random.default_rng(1)).mean()


def is_held_out(row: Row) -> bool:
    return ROWS.index(row) % 2 == 1


def step_rows() -> Iterator[tuple[Row, StepTime, float, float]]:
    """Yield (row, planned step, planned seconds including NeMo-RL's ``TURN_S``, relative error of these seconds)."""
    for row in ROWS:
        found = planned(row, machine_for(row.model))
        seconds = found.seconds + (0.0 if row.off else TURN_S)
        yield row, found, seconds, seconds / row.step_s - 1


def iteration_ms(model: str, tensor: int, responses: int, context: int) -> float:
    """Return the planned milliseconds of one iteration of an engine on H100s."""
    config = config_of(ROWS[0])
    rollout = config.rollout.model_copy(update={"tensor_parallel": tensor, "engines": 1})
    machine = machine_for(model)
    clock = engine_clock(config.model_copy(update={"rollout": rollout}), machine.shape, machine.rates)
    return 1e3 * float(clock.parts_s(responses, context, 1).sum())


BELIEF: Final = {"request_s": (1.0e-4, 0.19), "update_share of dense models": (0.3784, 0.45)}
"""(value of a constant by other measurements, weight of a deviation from this value in the fit). Deviations are in
logarithms. A weight is 0.1, the uncertainty of a step, divided by the uncertainty of the constant: a factor of 1.7 for
request_s, which is 0.06 to 0.17 ms by iterations of vLLM, and of 1.25 for the share, which our own update of a 1.5B
reached on one H100. Without these two, on-policy steps cannot tell rollouts from updates."""
FITTED: Final = (
    "request_s", "update_share of dense models", "update_share of mixtures", "network_message_s", "TURN_S"
)  # fmt: skip


def fit_steps() -> None:
    """Print the constants that bring the plan nearest to the rows that are not held out."""
    rows = [row for row in ROWS if not is_held_out(row)]
    one = machine_for("Llama-3.1-8B").rates
    first_s = one.iteration_s + one.request_s

    @cache
    def seconds(row: int, request_s: float, share: float, message_s: float) -> float:
        machine = machine_for(
            rows[row].model, request_s=request_s, update_share=share, iteration_s=max(first_s - request_s, 0.0),
            network_message_s=message_s,
        )  # fmt: skip
        return planned(rows[row], machine).seconds

    def predict(at: np.ndarray) -> list[float]:
        """Return the planned seconds of the rows, then for each entry of ``BELIEF`` 1 if the constant equals it."""
        beliefs = [(at[FITTED.index(name)] / value) ** weight for name, (value, weight) in BELIEF.items()]
        request_s, dense, mixture, message_s, turn_s = map(float, at)
        return [
            (0.0 if row.off else turn_s)
            + seconds(
                number, request_s, mixture if shape_of(row.model).experts else dense,
                message_s if row.engine_tensor > 8 else 0.0,
            )
            for number, row in enumerate(rows)
        ] + beliefs  # fmt: skip

    at, left = fit(predict, [*(row.step_s for row in rows), *(1.0 for _ in BELIEF)], (7e-5, 0.36, 0.1, 7e-5, 15.0))
    print(
        f"{len(FITTED)} free parameters, {len(rows)} rows; what is left: {', '.join(f'{error:+.1%}' for error in left)}"
    )
    for name, value in zip(FITTED, at, strict=True):
        print(f"{name}: {value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the fitted constants; takes minutes")
    if parser.parse_args().fit:
        fit_steps()
        return
    print("| model | policy | GPUs | | published, s | plan, s | error | rollout, score, update, s |")
    print("|---|---|---|---|---|---|---|---|")
    for row, found, seconds, error in step_rows():
        policy, use = f"{row.off}-off" if row.off else "on", "held out" if is_held_out(row) else "fitted"
        verbs = ", ".join(f"{found.verbs.get(name, 0.0):.0f}" for name in ("roll_out", "score", "update"))
        cells = f"{row.model} | {policy} | {row.gpus} | {use} | {row.step_s:g} | {seconds:.0f} | {error:+.0%}"
        print(f"| {cells} | {verbs} |", flush=True)
    print("| DeepSeek-V3 | on | 256 | not planned | 134 | | | |\n")
    print("| one iteration | TP | responses | tokens held | published, ms | plan, ms | error |")
    print("|---|---|---|---|---|---|---|")
    for model, tensor, responses, context, published in DECODING:
        found_ms = iteration_ms(model, tensor, responses, context)
        cells = f"{model} | {tensor} | {responses} | {context:,} | {published:.2f} | {found_ms:.2f}"
        print(f"| {cells} | {found_ms / published - 1:+.0%} |")


if __name__ == "__main__":
    main()
