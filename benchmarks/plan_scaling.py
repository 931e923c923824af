"""What 1,000 steps of the 32B recipe on 256 H800 would cost, as written and with what could be changed.

    python benchmarks/plan_scaling.py                       # prints the tables behind docs/planning.md
    python benchmarks/plan_scaling.py --figure docs/scaling.svg

The plan's constants are fitted to the paper's run of 309 h (benchmarks/plan_paper.py), so the first row is no
prediction. The others are, and each rests on the assumption that its name tells. The scheduler and the supply of
prompts are the run's own. The middle step of each stage stands for it (with staleness four
steps); evaluations and the start are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from plan_paper import machine, thirty_two_b

from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Moment, RecipeLengths
from or1_megatron.plan.run_time import RunTime, run_time
from or1_megatron.plan.step_time import Machine, workload_at
from or1_megatron.report.figures.svg import document, text

FAST_S: Final = (4.8e-3, 1.0e-4)
"""A lighter engine: the 7B's iteration_s, and a tenth of a millisecond per response."""
GPUS: Final = 256


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe."""

    title: str
    hidden: bool = True
    fast: bool = False
    staleness: int = 0
    trainers: int = GPUS
    """Fewer than all: engines have GPUs of their own."""
    concurrent: int = 64
    tensor: int = 4
    """GPUs of an engine."""

    @property
    def on_policy(self) -> bool:
        return self.staleness == 0


VARIANTS: Final = (
    Variant("as the recipe is written, with the paper's other", hidden=False),
    Variant("t_other hidden: verdicts beside decoding, head and handoff as planned"),
    Variant("+ engines of TP 2", tensor=2),
    Variant("+ a lighter engine", fast=True),
    Variant("staleness 1, 48 GPUs train", staleness=1, trainers=48, concurrent=128),
    Variant("staleness 2, 48 GPUs train", staleness=2, trainers=48, concurrent=128),
    Variant("staleness 2, 32 GPUs train", staleness=2, trainers=32, concurrent=128),
    Variant("staleness 2, 48 GPUs train, engines of TP 2", staleness=2, trainers=48, concurrent=64, tensor=2),
    Variant("staleness 2, 64 GPUs train, a lighter engine", staleness=2, trainers=64, concurrent=128, fast=True),
)  # fmt: skip


def planned(variant: Variant, stages: int = 2) -> tuple[Config, Machine, RunTime]:
    config = _config(variant)
    config = config.model_copy(update={"stages": config.stages[:stages]})
    on = machine("32b", **(dict(zip(("iteration_s", "request_s"), FAST_S, strict=True)) if variant.fast else {}))
    on = on.hidden() if variant.hidden else on
    return config, on, run_time(config, on, RecipeLengths(), points=1)


def hours(time: RunTime) -> dict[str, float]:
    """Return the hours of all steps by part."""
    total = sum(stage.count for stage in time.stages) / 3600
    verbs = {verb: spent * total for verb, spent in time.step_s.items()}
    roll_out, update = verbs.pop("roll_out", 0.0) + verbs.pop("verify", 0.0), verbs.pop("update")
    return {"roll_out": roll_out, "update": update, "rest": sum(verbs.values())}


def busy(time: RunTime) -> float:
    """Return the share of the time in which an engine decodes, mean over engines."""
    return sum(stage.hours * stage.utilisation for stage in time.stages) / sum(stage.hours for stage in time.stages)


def _config(variant: Variant) -> Config:
    config = thirty_two_b()
    rollout: dict[str, Any] = {"max_staleness": variant.staleness, "max_concurrent": variant.concurrent}
    engine_gpus = GPUS - variant.trainers or GPUS
    rollout |= {"engines": engine_gpus // variant.tensor, "tensor_parallel": variant.tensor}
    if engine_gpus < GPUS:
        rollout |= {"placement": "separate"}
    ranks = config.parallel.model_copy(update={"ranks": variant.trainers})
    return config.model_copy(update={"parallel": ranks, "rollout": config.rollout.model_copy(update=rollout)})


@dataclass(frozen=True)
class Floor:
    """What no scheduler goes below, in one engine's seconds of a mean step."""

    own_s: float
    """A token's share of an iteration and its products."""
    read_s: float
    """Reading the keys and values before each token."""
    shared_s: float
    """The rest of an iteration, shared by as many responses as the KV cache holds."""
    running: float
    """How many these are, mean over the tokens."""

    @property
    def seconds(self) -> float:
        return self.own_s + self.read_s + self.shared_s


def longest(config: Config, on: Machine) -> str:
    """Return, by stage, how long a response of T tokens takes alone, and how many responses and groups reach T."""
    said = []
    for index, stage in enumerate(config.stages):
        when = Moment(config.stages, index, stage.steps / 2)
        tokens = workload_at(stage, RecipeLengths(), when, np.random.default_rng([1, index])).response_tokens
        at_t = tokens.reshape(-1, stage.group_size) >= stage.max_response_tokens
        alone_s = on.clock(config).iterations_s(1, 0, stage.max_response_tokens)
        said.append(
            f"stage {stage.name}: {stage.max_response_tokens} tokens alone take {alone_s:.0f} s; {at_t.mean():.0%} of "
            f"the responses and {at_t.any(axis=1).mean():.0%} of the groups reach them"
        )
    return "\n".join(said)


def floor(config: Config, on: Machine) -> Floor:
    """Return the floor of a rollout, mean over the steps of all stages, each as its middle step."""
    clock, steps = on.clock(config), sum(stage.steps for stage in config.stages)
    parts = np.zeros(4)
    for index, stage in enumerate(config.stages):
        when = Moment(config.stages, index, stage.steps / 2)
        work = workload_at(stage, RecipeLengths(), when, np.random.default_rng([1, index]))
        tokens, prompts = work.response_tokens, np.repeat(work.prompt_tokens, work.group_size)
        held = float((tokens * prompts + tokens * (tokens - 1) // 2).sum())
        of_engine = float(tokens.sum()) / config.rollout.engines
        running = clock.kv_tokens * tokens.sum() / held
        rest_s = clock.constant_s(round(running)) - running * (clock.response_s + clock.product_s)
        own_s, read_s = of_engine * (clock.response_s + clock.product_s), held * clock.token_s / config.rollout.engines
        parts += stage.steps / steps * np.array([own_s, read_s, of_engine * rest_s / running, running])
    return Floor(*map(float, parts))


def figure(rows: Mapping[str, tuple[dict[str, float], bool]]) -> str:
    """Return bars of the hours, by part."""
    left, width, height, scale = 420, 900, 26, 400 / 320
    colours = {"roll_out": "#2f6fde", "update": "#e39a2d", "rest": "#9aa3ad"}
    shapes = []
    for n, (title, (parts, _)) in enumerate(rows.items()):
        y, x = 40 + n * height, float(left)
        shapes.append(text(left - 8, y + 14, title, anchor="end", more=' font-size="12"'))
        for part, spent in parts.items():
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{spent * scale:.1f}" height="{height - 8}" fill="{colours[part]}">'
                f"<title>{part}: {spent:.0f} h</title></rect>"
            )
            x += spent * scale
        shapes.append(text(x + 6, y + 14, f"{sum(parts.values()):.0f} h", more=' font-size="12"'))
    for n, (part, colour) in enumerate(colours.items()):
        shapes.append(f'<rect x="{left + n * 110}" y="12" width="12" height="12" fill="{colour}"/>')
        shapes.append(text(left + 18 + n * 110, 22, part, more=' font-size="12"'))
    return document(width, 56 + len(rows) * height, shapes)


def bound() -> str:
    """Return what the constants leave for scheduling: the floor of the rollout and the update, against a step."""
    heads = "| | step | tokens' own | keys and values | shared, by how many | update | in all | at most |"
    lines = ["", heads, "|---|---|---|---|---|---|---|---|"]
    for variant in (VARIANTS[1], next(each for each in VARIANTS if each.fast)):
        config, on, time = planned(variant)
        least, update_s, step_s = floor(config, on), time.step_s["update"], sum(time.step_s.values())
        total_s = least.seconds + update_s
        shown = " | ".join(f"{seconds:.0f} s" for seconds in (step_s, least.own_s, least.read_s, least.shared_s))
        name = "a lighter engine" if variant.fast else "fitted engine"
        shown += f", {least.running:.0f} | {update_s:.0f} s | {total_s:.0f} s | {step_s / total_s:.2f} times"
        lines.append(f"| {name} | {shown} |")
    config, on, _ = planned(VARIANTS[1])
    return "\n".join([*lines, "", longest(config, on)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write the figure there")
    arguments = parser.parse_args()
    print("| | rollout, h | update, h | rest, h | in all, h | steps per hour | engines decode | on-policy |")
    print("|---|---|---|---|---|---|---|---|")
    rows: dict[str, tuple[dict[str, float], bool]] = {}
    synchronous = sum(hours(planned(VARIANTS[1])[2]).values())
    for variant in VARIANTS:
        _, _, time = planned(variant)
        parts = hours(time)
        rows[variant.title] = (parts, variant.on_policy)
        ratio = synchronous / sum(parts.values())
        shown = " | ".join(f"{spent:.0f}" for spent in (*parts.values(), sum(parts.values())))
        policy = "yes" if variant.on_policy else "no"
        print(f"| {variant.title} | {shown} | {ratio:.2f} | {busy(time):.0%} | {policy} |", flush=True)
    print(bound())
    if arguments.figure is not None:
        arguments.figure.write_text(figure(rows))


if __name__ == "__main__":
    main()
