"""Fits a machine's constants to runs: four of them, to the time of each run's roll-outs, updates and the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from or1_megatron.config.hardware import Constant, Fit, Hardware
from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config
from or1_megatron.errors import UserError
from or1_megatron.plan.fit import fit
from or1_megatron.plan.lengths import Lengths, Moment, read_lengths
from or1_megatron.plan.step_time import OTHER, Machine, step_time
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import Shape

CONSTANTS: Final = ("iteration_s", "request_s", "update_share", "other_response_s")
_FITTED: Final = ("roll_out", "update", OTHER)
_APART: Final = ("roll_out", "verify", "update", "score", "hand_off", "evaluate", "save", "export")
"""Verbs that do not count as the rest."""


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
    """roll_out, update and other."""


@dataclass(frozen=True, slots=True)
class Residual:
    run: str
    verb: str
    measured_s: float
    plan_s: float

    @property
    def error(self) -> float:
        return self.plan_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    hardware: Hardware
    rows: tuple[Residual, ...]
    free_parameters: int = len(CONSTANTS)


def read_run(folder: Path) -> MeasuredRun:
    """Read a run folder. Raises RunError where it has no configuration, metrics or two steps."""
    metrics = folder / "metrics.jsonl"
    for needed in (folder / "config.yaml", metrics):
        if not needed.is_file():
            raise RunError(f"--calibrate {folder}: {needed.name} is not there; expected a run folder")
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.strip()]
    steps = [row for row in rows if "time/step" in row and "time/roll_out" in row][1:]
    if not steps:
        raise RunError(f"--calibrate {folder}: {metrics.name} has fewer than two steps; the first is not used")
    config = load_config(folder / "config.yaml")
    means = {verb: float(np.mean([row.get(f"time/{verb}", 0.0) for row in steps])) for verb in _APART}
    whole = float(np.mean([row["time/step"] for row in steps]))
    seconds = {"roll_out": means["roll_out"], "update": means["update"], OTHER: whole - sum(means.values())}
    shape = Shape.of(read_hf_config(config.model.hf))
    return MeasuredRun(str(folder), config, shape, read_lengths(folder), {k: max(v, 1e-4) for k, v in seconds.items()})


def predicted(run: MeasuredRun, hardware: Hardware) -> dict[str, float]:
    """Return the plan's seconds for ``run``: its lengths, its configuration, without evaluations."""
    machine = Machine.of(hardware, run.shape, "cpu" if not hardware.match else "cuda")
    index = (run.config.run.stage or 1) - 1
    when = Moment(run.config.stages, index, 0)
    found = step_time(run.config, machine, run.lengths, when, 0.0, np.random.default_rng(1))
    return {verb: found.verbs.get(verb, 0.0) for verb in _FITTED}


def calibrate(runs: Sequence[MeasuredRun], hardware: Hardware) -> Calibration:
    """Return ``hardware`` with one fit, to ``runs``, and what is left of each figure."""
    size = float(np.exp(np.mean([np.log(run.shape.parameters) for run in runs])))
    names = ", ".join(run.name for run in runs)

    def with_constants(values: Sequence[float]) -> Hardware:
        source = f"fitted to {names}"
        made = {
            name: Constant(value=float(f"{v:.4g}"), source=source) for name, v in zip(CONSTANTS, values, strict=True)
        }
        return hardware.model_copy(update={"fits": (Fit(model_parameters=size, **made),)})

    def plan(values: Sequence[float]) -> list[float]:
        made = with_constants(values)
        return [spent for run in runs for spent in predicted(run, made).values()]

    measured = [run.seconds[verb] for run in runs for verb in _FITTED]
    begin = hardware.fit_for(size)
    start = [max(getattr(begin, name).value, 1e-7) for name in CONSTANTS]
    values, _ = fit(lambda at: plan(at.tolist()), measured, start)
    took = plan(values.tolist())
    rows = [
        Residual(run.name, verb, measured[n], took[n])
        for n, (run, verb) in enumerate((run, verb) for run in runs for verb in _FITTED)
    ]
    made = with_constants(values.tolist())
    worst = max(abs(row.error) for row in rows)
    error = Constant(
        value=float(f"{max(worst, 0.05):.2g}"), source=f"largest residual of the fit to {names}, 5% at least"
    )
    return Calibration(made.model_copy(update={"error": error}), tuple(rows))
