"""What 1,000 steps of the 32B recipe on 256 H800 would cost, as written and with what could be changed.

    python benchmarks/plan_scaling.py                       # prints the table of docs/scaling.md
    python benchmarks/plan_scaling.py --figure docs/scaling.svg

The plan's constants are fitted to the paper's run of 309 h (benchmarks/plan_paper.py), so the first row is no
prediction. The others are, and each rests on the assumption that its name tells. The middle step of each stage stands
for it; evaluations and the start are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from plan_paper import machine, thirty_two_b

from or1_megatron.config.schema import Config
from or1_megatron.plan import moves
from or1_megatron.plan.clocks import engine_clock
from or1_megatron.plan.lengths import Moment, RecipeLengths
from or1_megatron.plan.rollout_time import RolloutTime, Workload, simulate
from or1_megatron.plan.step_time import Machine, kept_sequences
from or1_megatron.plan.update_time import update_time
from or1_megatron.report.figures.svg import document, text

MORE_PROMPTS: Final = 1.25
"""Tail batching: prompts asked in a short round over those that are kept."""
ACCEPTED: Final = 1.7
"""Speculation: tokens that an iteration yields; arXiv 2511.13841 publishes 30 to 50% less roll-out time, 2604.26779
1.8 times at 8B."""
DRAFTED: Final = 4
"""Tokens that a response's iteration computes then."""
FAST_S: Final = (4.8e-3, 1.0e-4)
"""A lighter engine: the 7B's iteration_s, and a tenth of a millisecond per response."""


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe."""

    title: str
    hidden: bool = True
    tail: bool = False
    speculation: bool = False
    fast: bool = False
    trainer_share: float = 0.0
    """Above 0: engines have GPUs of their own, and the next step is sampled while this one trains."""
    on_policy: bool = True


VARIANTS: Final = (
    Variant("as the recipe is written, with the paper's other", hidden=False),
    Variant("t_other hidden: verdicts beside decoding, head and handoff as planned"),
    Variant("+ tail batching", tail=True),
    Variant("+ speculation", speculation=True),
    Variant("+ a lighter engine", fast=True),
    Variant("+ speculation, a lighter engine", speculation=True, fast=True),
    Variant("+ tail batching, a lighter engine", tail=True, fast=True),
    Variant("staleness 1, 64 GPUs train", trainer_share=0.25, on_policy=False),
    Variant("staleness 1, 32 GPUs train", trainer_share=0.125, on_policy=False),
    Variant("staleness 1, 64 GPUs train, a lighter engine", trainer_share=0.25, fast=True, on_policy=False),
)  # fmt: skip


def hours(variant: Variant) -> dict[str, float]:
    """Return the hours of 1,000 steps by part."""
    config, on = _config(variant), machine("32b")
    if variant.hidden:
        on = on.hidden()
    if variant.fast:
        on = replace(on, rates=replace(on.rates, iteration_s=FAST_S[0], request_s=FAST_S[1]))
    total = dict.fromkeys(("roll_out", "update", "rest"), 0.0)
    for index, stage in enumerate(config.stages):
        for part, spent in _step(config, on, variant, index).items():
            total[part] += spent * stage.steps / 3600
    return total


def _config(variant: Variant) -> Config:
    config = thirty_two_b()
    if not variant.trainer_share:
        return config
    ranks = int(256 * variant.trainer_share)
    rollout = {"engines": (256 - ranks) // 4, "placement": "separate", "max_concurrent": 128}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"ranks": ranks}),
            "rollout": config.rollout.model_copy(update=rollout),
        }
    )


def _step(config: Config, on: Machine, variant: Variant, index: int) -> Mapping[str, float]:
    stage, random = config.stages[index], np.random.default_rng([1, index])
    when, lengths = Moment(config.stages, index, stage.steps / 2), RecipeLengths()
    prompts, responses = lengths.draw(when, stage.prompts_per_step, stage.group_size, stage.max_response_tokens, random)
    workload = Workload(prompts, responses, stage.group_size)
    update_s = update_time(
        config, on.shape, on.rates, kept_sequences(stage, workload, lengths.kept_share, random), 1
    ).seconds
    if moves.turns(config, True):
        update_s += moves.state_move_s(config, on.shape, on.rates)
    if variant.tail:
        rollout_s = _tail_batched_s(config, on, variant, index, random)
    else:
        rollout_s = _simulate(config, on, variant, workload).judged_s
    rest_s = on.rates.other_response_s * responses.size
    if variant.hidden:
        copied_s, _ = moves.save_s(config, on.shape, on.rates)
        rest_s += moves.hand_off_s(config, on.shape, on.rates) + copied_s / config.checkpoint.every_steps
    if variant.trainer_share:
        return {"roll_out": max(0.0, rollout_s - update_s), "update": update_s, "rest": rest_s}
    return {"roll_out": rollout_s, "update": update_s, "rest": rest_s}


def _tail_batched_s(config: Config, on: Machine, variant: Variant, index: int, random: np.random.Generator) -> float:
    """Return the seconds of a roll-out, mean over the short rounds and the long one.

    A short round asks for more prompts than it keeps and ends when enough groups are complete. The others, dropped
    whole, wait; when they are as many as a step takes, a long round samples them with the weights of its time. So every
    response is of the current policy, and no response is preferred within a group.
    """
    stage = config.stages[index]
    wanted = stage.prompts_per_step
    asked = int(wanted * MORE_PROMPTS)
    when = Moment(config.stages, index, stage.steps / 2)
    prompts, responses = RecipeLengths().draw(when, asked, stage.group_size, stage.max_response_tokens, random)
    found = _simulate(config, on, variant, Workload(prompts, responses, stage.group_size))
    complete = found.finished_s.reshape(asked, stage.group_size).max(axis=1)
    order = np.argsort(complete)
    short_s = float(complete[order[wanted - 1]])
    late = np.resize(order[wanted:], wanted)  # as many as a long round takes, of prompts as slow as these
    slow = Workload(prompts[late], responses.reshape(asked, -1)[late].ravel(), stage.group_size)
    rounds = wanted / (asked - wanted)  # short ones for each long one
    return (rounds * short_s + _simulate(config, on, variant, slow).judged_s) / (rounds + 1)


def _simulate(config: Config, on: Machine, variant: Variant, workload: Workload) -> RolloutTime:
    clock = engine_clock(config, on.shape, on.rates)
    if variant.speculation:
        # An iteration yields ACCEPTED tokens, computes DRAFTED, and the cache grows as many times faster.
        clock = replace(clock, product_s=clock.product_s * DRAFTED, token_s=clock.token_s * ACCEPTED)
        clock = replace(clock, kv_tokens=int(clock.kv_tokens / ACCEPTED))
        fewer = np.ceil(workload.response_tokens / ACCEPTED).astype(np.int64)
        workload = replace(workload, response_tokens=fewer)
    return simulate(workload, clock, config.rollout.engines, 64, on.rates.verdict_s)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write the figure there")
    arguments = parser.parse_args()
    rows = {variant.title: (hours(variant), variant.on_policy) for variant in VARIANTS}
    print("| | roll-out, h | update, h | rest, h | in all, h | on-policy |\n|---|---|---|---|---|---|")
    for title, (parts, on_policy) in rows.items():
        shown = " | ".join(f"{spent:.0f}" for spent in (*parts.values(), sum(parts.values())))
        print(f"| {title} | {shown} | {'yes' if on_policy else 'no'} |")
    if arguments.figure is not None:
        arguments.figure.write_text(figure(rows))


if __name__ == "__main__":
    main()
