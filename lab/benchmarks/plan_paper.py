"""Fits the plan's constants for H800 (a system of 2025) to tables 7 and 9 of the paper, and tests them with table 8.

    python lab/benchmarks/plan_paper.py            # prints the tables behind docs/planning.md
    python lab/benchmarks/plan_paper.py --write    # writes the constants into the hardware file too

The paper does not tell lengths, engines or layouts of these runs. Assumptions: the recipe's distribution of lengths,
engines of TP 1 (7B) and TP 4 (32B), and the layouts of configs/layouts for as many GPUs. Every step of a stage is
assumed to last as long as the stage's middle step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from or1_megatron.config.hardware import Constant, Fit, read_hardware
from or1_megatron.config.load import load_config
from or1_megatron.config.recipes import named
from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Moment, RecipeLengths
from or1_megatron.plan.run_time import run_time
from or1_megatron.plan.step_time import Machine, Workload, sample
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape

COVERS = ("verify", "score", "hand_off", "save", "evaluate")
TABLE_9 = {32: 375.0, 64: 270.0, 128: 225.0, 256: 205.0}
"""Seconds of a rollout of 1,024 responses, by number of GPUs."""
TABLE_7 = {"roll_out": 223.0, "update": 27.0, "other": 59.0}
"""Hours that 1,000 steps of the 32B take on 256 GPUs."""
TABLE_8 = {  # D_T: hours of 1,000 steps of the 7B on 32 GPUs, D_R 64, groups of 16, T 16K
    64: {"roll_out": 90.0, "update": 8.0, "other": 18.0},
    32: {"roll_out": 87.0, "update": 10.0, "other": 17.0},
    16: {"roll_out": 90.0, "update": 12.0, "other": 16.0},
}

NUDGE = 0.02


def shape_of(size: str) -> Shape:
    return Shape.of(read_hf_config(named("shape")[f"deepseek_r1_distill_qwen_{size}"]))


def seven_b(update_prompts: int = 64, gpus: int = 32) -> Config:
    """Return the configuration of the paper's baseline of ablations."""
    stage = (
        f"{{name: '1', steps: 1000, max_response_tokens: 16384, prompts_per_step: 64, "
        f"prompts_per_update: {update_prompts}, group_size: 16}}"
    )
    changed = [f"stages=[{stage}]", f"rollout.engines={gpus}", f"parallel.ranks={gpus}", "evaluate.data=[]"]
    return load_config(named("recipe")["or1_7b"], [*changed, "rollout.max_concurrent=256"])


def thirty_two_b() -> Config:
    """Return the configuration of the 32B recipe's first 1,000 steps on 32 nodes."""
    layout = load_config(named("recipe")["or1_32b"], ["stages.1.steps=240", "parallel.ranks=256", "evaluate.data=[]"])
    rollout = layout.rollout.model_copy(update={"engines": 64, "max_concurrent": 64})
    return layout.model_copy(update={"rollout": rollout})


def machine(size: str, **changed: float) -> Machine:
    made = Machine.of(read_hardware("h800_2025"), shape_of(size), "cuda")
    return replace(made, rates=replace(made.rates, **changed), covers=COVERS)


def rollout_s(gpus: int, iteration_s: float, request_s: float) -> float:
    config = seven_b(gpus=gpus)
    prompts, responses = RecipeLengths().draw(Moment(config.stages, 0, 0), 64, 16, 16384, np.random.default_rng(9))
    on = machine("7b", iteration_s=iteration_s, request_s=request_s)
    return sample(config, on, Workload(prompts, responses, 16))[0]


def hours(config: Config, on: Machine) -> dict[str, float]:
    found = run_time(config, on, RecipeLengths())
    total = sum(stage.count for stage in found.stages)
    return {verb: spent * total / 3600 for verb, spent in found.step_s.items()}


def fit(
    predict: Callable[[np.ndarray], Sequence[float]], measured: Sequence[float], start: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the constants with which ``predict`` is nearest to ``measured``, and the remaining relative errors.

    The method is Gauss-Newton on the logarithms of the constants, with numerical derivatives and damping.

    Args:
        predict: a function of constants [k] that returns as many figures as were measured.
        start: constants [k] to start with, each above 0.
    """
    target = np.asarray(measured, float)
    at = np.log(np.asarray(start, float))

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.asarray(predict(np.exp(logs)), float) / target - 1

    left = errors(at)
    damping = 1e-3
    for _ in range(60):
        slopes = np.stack([(errors(at + nudge) - left) / NUDGE for nudge in NUDGE * np.eye(at.size)], axis=1)
        curvature = slopes.T @ slopes
        weighted = curvature + damping * np.diag(np.maximum(np.diag(curvature), 1e-12))
        step = np.clip(-np.linalg.solve(weighted, slopes.T @ left), -1.0, 1.0)
        after = errors(at + step)
        if after @ after < left @ left:
            small = np.abs(step).max() < 5e-3
            at, left, damping = at + step, after, damping / 3
            if small:
                break
        elif (damping := damping * 10) > 1e6:
            break
    return np.exp(at), left


def fit_all() -> tuple[Mapping[str, Fit], list[str]]:
    lines = ["| | GPUs | measured | plan | error |", "|---|---|---|---|---|"]
    measured = list(TABLE_9.values())
    small, left = fit(lambda at: [rollout_s(n, float(at[0]), float(at[1])) for n in TABLE_9], measured, (6e-3, 4e-4))
    for (gpus, seconds), error in zip(TABLE_9.items(), left, strict=True):
        lines.append(
            f"| table 9, 7B rollout | {gpus} | {seconds:.0f} s | {seconds * (1 + error):.0f} s | {error:+.1%} |"
        )

    def of_32b(at: np.ndarray) -> list[float]:
        rates = {"iteration_s": at[0], "request_s": small[1], "update_share": at[1], "other_response_s": at[2]}
        found = hours(thirty_two_b(), machine("32b", **{name: float(value) for name, value in rates.items()}))
        return [found[verb] for verb in TABLE_7]

    large, left = fit(of_32b, list(TABLE_7.values()), (8e-3, 0.3, 0.05))
    for (verb, took), error in zip(TABLE_7.items(), left, strict=True):
        lines.append(f"| table 7, 32B {verb} | 256 | {took:.0f} h | {took * (1 + error):.0f} h | {error:+.1%} |")
    return {
        "7b": _fit("7b", small[0], small[1], large, own=False),
        "32b": _fit("32b", large[0], small[1], large),
    }, lines


def _fit(size: str, iteration_s: float, request_s: float, large: np.ndarray, own: bool = True) -> Fit:
    decoding = "table 7, 32B" if own else "table 9, 7B"
    rest = "fitted to table 7, 32B" + ("" if own else "; the 7B has no fit of its own")
    return Fit(
        model_parameters=float(shape_of(size).parameters),
        iteration_s=Constant(value=float(f"{iteration_s:.4g}"), source=f"fitted to {decoding}"),
        request_s=Constant(value=float(f"{request_s:.4g}"), source="fitted to table 9, 7B"),
        update_share=Constant(value=float(f"{large[1]:.4g}"), source=rest),
        other_response_s=Constant(value=float(f"{large[2]:.4g}"), source=rest),
        covers=COVERS,
    )


def held_out(fits: Mapping[str, Fit]) -> list[str]:
    found = fits["7b"]
    names = ("iteration_s", "request_s", "update_share", "other_response_s")
    on = machine("7b", **{name: getattr(found, name).value for name in names})
    lines = ["| table 8: 7B, 32 GPUs | measured, h | plan, h | error |", "|---|---|---|---|"]
    for update_prompts, measured in TABLE_8.items():
        plan = hours(seven_b(update_prompts), on)
        rows = [*measured.items(), ("in all", sum(measured.values()))]
        plan["in all"] = sum(plan.get(verb, 0.0) for verb in measured)
        for verb, took in rows:
            error = plan[verb] / took - 1
            lines.append(f"| N_SGD {64 // update_prompts}, {verb} | {took:.0f} | {plan[verb]:.1f} | {error:+.0%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write configs/hardware/h800_2025.yaml")
    arguments = parser.parse_args()
    fits, lines = fit_all()
    print("Fitted: 5 free parameters (2 on table 9, 3 on table 7), 7 figures\n")
    print("\n".join(lines), "", "Held out\n", "\n".join(held_out(fits)), sep="\n")
    for size, found in fits.items():
        print(f"\n{size}: {found.model_dump(exclude={'covers'})}")
    if arguments.write:
        write(fits)


def write(fits: Mapping[str, Fit]) -> None:
    """Replace the end of the hardware file, from ``fits:`` on."""
    path = named("hardware")["h800_2025"]
    text = path.read_text()
    lines = ["fits:"]
    for found in fits.values():
        lines.append(f"  - model_parameters: {found.model_parameters}")
        for name in ("iteration_s", "request_s", "update_share", "other_response_s"):
            constant = getattr(found, name)
            lines.append(f'    {name}: {{value: {constant.value}, source: "{constant.source}"}}')
        lines.append(f"    covers: [{', '.join(found.covers)}]")
    path.write_text(text[: text.index("fits:\n")] + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
