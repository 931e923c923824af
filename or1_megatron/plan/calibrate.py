"""Fits a machine's constants to the time of runs' rollouts, updates and the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from or1_megatron.config.hardware import Constant, Hardware
from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config
from or1_megatron.plan.lengths import Lengths, Moment, read_lengths
from or1_megatron.plan.step_time import OTHER, Machine, step_time
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape
from or1_verify.errors import UserError

CONSTANTS: Final = ("iteration_s", "request_s", "update_share", "other_response_s")
ON_CPU: Final = ("iteration_s", "request_s", "other_response_s", "busy_share", "activation_passes")
"""Constants that are fitted instead where cores are the devices: their products run at the measured rate."""
COVERS: Final = ("verify", "score", "hand_off", "save")
"""Verbs that are fitted together with the rest of a step, as OTHER."""
_FITTED: Final = ("roll_out", "update", OTHER)
_APART: Final = ("roll_out", "update", "evaluate", "export")
"""Verbs that do not count as the rest."""
_NUDGE: Final = 0.02
_STEPS: Final = 60
_STUCK: Final = 1e6
"""Damping at which steps are too short to help."""
_FARTHEST: Final = 1.0
"""A step changes the logarithm of a constant by no more than this."""
_HOLD: Final = 0.05
"""A constant that the runs do not tell stays near what it was: to change it by a factor e counts as an error of 5%."""

Floats = NDArray[np.float64]


class RunError(UserError, ValueError):
    """A run that cannot be calibrated on; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What one run took, mean over its steps but the first."""

    name: str
    config: Config
    shape: Shape
    lengths: Lengths
    seconds: dict[str, float]
    """roll_out, update and other, which is the rest of a step, evaluations and exports apart."""


@dataclass(frozen=True, slots=True)
class Residual:
    """What the fit leaves of one figure."""

    run: str
    verb: str
    measured_s: float
    error: float
    """Relative error of the plan's seconds."""


@dataclass(frozen=True, slots=True)
class Calibration:
    hardware: Hardware
    rows: tuple[Residual, ...]
    free_parameters: int


def read_run(folder: Path) -> MeasuredRun:
    """Read a run folder: the medians of the verbs' seconds over the steps but the first.

    Raises RunError where it has no configuration, metrics or two steps.
    """
    metrics = folder / "metrics.jsonl"
    for needed in (folder / "config.yaml", metrics):
        if not needed.is_file():
            raise RunError(f"--calibrate {folder}: {needed.name} is not there; expected a run folder")
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.strip()]
    steps = [row for row in rows if "time/step" in row and "time/roll_out" in row][1:]
    if not steps:
        raise RunError(f"--calibrate {folder}: {metrics.name} has fewer than two steps; the first is not used")
    config = load_config(folder / "config.yaml")
    spent = {verb: [row.get(f"time/{verb}", 0.0) for row in steps] for verb in ("roll_out", "update")}
    spent[OTHER] = [row["time/step"] - sum(row.get(f"time/{verb}", 0.0) for verb in _APART) for row in steps]
    seconds = {verb: float(np.median(taken)) for verb, taken in spent.items()}
    shape = Shape.of(read_hf_config(config.model.hf))
    return MeasuredRun(str(folder), config, shape, read_lengths(folder), {k: max(v, 1e-4) for k, v in seconds.items()})


def predicted(run: MeasuredRun, hardware: Hardware) -> dict[str, float]:
    """Return the plan's seconds for ``run``: its lengths, its configuration, without evaluations."""
    machine = Machine.of(hardware, run.shape, "cuda" if hardware.match else "cpu")
    when = Moment(run.config.stages, (run.config.run.stage or 1) - 1, 0)
    step = step_time(run.config, machine, run.lengths, when, 0.0, np.random.default_rng(1))
    return {verb: step.verbs.get(verb, 0.0) for verb in _FITTED}


def fit(
    predict: Callable[[Floats], Sequence[float]], measured: Sequence[float], start: Sequence[float], hold: float = 0.0
) -> tuple[Floats, Floats]:
    """Return the constants that bring ``predict`` nearest to ``measured``, and the relative errors that are left.

    Gauss-Newton in the constants' logarithms, with differences for derivatives, damped until a step helps.

    Args:
        predict: from constants [k] to as many figures as were measured.
        start: [k], each above 0.
        hold: the error that a constant counts for per factor e from its start, so that constants about which the
            figures tell nothing stay there.
    """
    target = np.asarray(measured, float)
    begin = at = np.log(np.asarray(start, float))

    def errors(logs: Floats) -> Floats:
        return np.concatenate([np.asarray(predict(np.exp(logs)), float) / target - 1, hold * (logs - begin)])

    left = errors(at)
    damping = 1e-3
    for _ in range(_STEPS):
        slopes = np.stack([(errors(at + nudge) - left) / _NUDGE for nudge in _NUDGE * np.eye(at.size)], axis=1)
        curvature = slopes.T @ slopes
        weighted = curvature + damping * np.diag(np.maximum(np.diag(curvature), 1e-12))
        step = np.clip(-np.linalg.solve(weighted, slopes.T @ left), -_FARTHEST, _FARTHEST)
        after = errors(at + step)
        if after @ after < left @ left:
            small = np.abs(step).max() < 5e-3
            at, left, damping = at + step, after, damping / 3
            if small:
                break
        elif (damping := damping * 10) > _STUCK:
            break
    return np.exp(at), left[: target.size]


def calibrate(runs: Sequence[MeasuredRun], hardware: Hardware) -> Calibration:
    """Return ``hardware`` with one fit, to ``runs``, and what is left of each figure.

    The constants are ON_CPU for hardware that is found by no device name, else CONSTANTS.
    """
    size = float(np.exp(np.mean([np.log(run.shape.parameters) for run in runs])))
    source = f"fitted to {', '.join(run.name for run in runs)}"
    begin = hardware.fit_for(size)
    names = CONSTANTS if hardware.match else ON_CPU

    def with_constants(values: Sequence[float]) -> Hardware:
        made = {
            name: Constant(value=float(f"{value:.4g}"), source=source)
            for name, value in zip(names, values, strict=True)
        }
        own = begin.model_copy(update={name: made.pop(name) for name in CONSTANTS if name in made})
        fits = (own.model_copy(update={"model_parameters": round(size), "covers": COVERS}),)
        return hardware.model_copy(update={"fits": fits, **made})

    def plan(values: Floats) -> list[float]:
        made = with_constants(values.tolist())
        return [spent for run in runs for spent in predicted(run, made).values()]

    figures = [(run.name, verb, run.seconds[verb]) for run in runs for verb in _FITTED]
    start = [max(getattr(begin if name in CONSTANTS else hardware, name).value, 1e-7) for name in names]
    values, errors = fit(plan, [seconds for _, _, seconds in figures], start, _HOLD)
    worst = float(f"{max(np.abs(errors).max(), 0.05):.2g}")
    error = Constant(value=worst, source=f"largest residual, {source}, 5% at least")
    rows = tuple(Residual(*figure, float(left)) for figure, left in zip(figures, errors, strict=True))
    return Calibration(with_constants(values.tolist()).model_copy(update={"error": error}), rows, values.size)
