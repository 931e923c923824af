"""``or1 plan``: reads what a plan needs, and prints it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from or1_megatron.commands.options import config_file, note, shape_folder
from or1_megatron.config.hardware import Hardware, hardware_of, read_hardware
from or1_megatron.config.load import ConfigError, load_config
from or1_megatron.config.recipes import find
from or1_megatron.config.schema import Config
from or1_megatron.errors import USER_ERROR
from or1_megatron.plan.lengths import Lengths, read_lengths
from or1_megatron.plan.nearest import Change, nearest_fit
from or1_megatron.plan.picture import picture, svg
from or1_megatron.plan.run_time import RunTime, run_time
from or1_megatron.plan.step_time import Machine
from or1_megatron.plan.tables import as_dict, time_tables
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.sizing.conflicts import Device
from or1_megatron.sizing.dry_run import plan_run
from or1_megatron.sizing.memory import gib, needed
from or1_megatron.sizing.plan_tables import render
from or1_megatron.sizing.run_plan import Plan
from or1_megatron.sizing.storage import disk_short, node_memory


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for."""

    path: Path
    overrides: tuple[str, ...]
    config: Config
    folder: Path | None
    """The model shape to plan with where the model is not there."""
    hardware: Hardware
    device: Device
    lengths: Lengths

    def with_overrides(self, more: Sequence[str]) -> PlanRequest:
        overrides = (*self.overrides, *more)
        config = _with_memory(load_config(self.path, overrides), self.hardware, self.device)
        return PlanRequest(self.path, overrides, config, self.folder, self.hardware, self.device, self.lengths)

    def planned(self) -> Plan:
        return plan_run(self.config, self.device, self.folder)


def asked(
    config: Path, overrides: Sequence[str], gpu: str | None, lengths: Path | None, shape: Path | None
) -> PlanRequest:
    """Read what the options name. Raises ConfigError, LengthsError and ModelError for what cannot be read."""
    path = config_file(config)
    loaded = load_config(path, overrides)
    hardware = read_hardware(gpu) if gpu else _hardware_for(loaded)
    device: Device = "cuda" if hardware.match else "cpu"
    folder = find("shape", shape) if shape else shape_folder(loaded)
    loaded = _with_memory(loaded, hardware, device)
    return PlanRequest(path, tuple(overrides), loaded, folder, hardware, device, read_lengths(lengths))


def _hardware_for(config: Config) -> Hardware:
    """Return this machine's GPU; without one, a GPU with the memory that the layout names, else the CPU."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found = hardware_of(name)
        if found is None:
            raise ConfigError(f"no hardware file is known for {name}; name one with --gpu")
        return found
    size_gb = config.cluster.gpu_memory_gb
    if size_gb is None:
        return read_hardware("cpu")
    named = "h200" if size_gb > 100 else "h800"
    note(f"planned for {named}, since cluster.gpu_memory_gb is {size_gb:g}; --gpu names another")
    return read_hardware(named)


def _with_memory(config: Config, hardware: Hardware, device: Device) -> Config:
    """Return ``config`` with the hardware's GPU memory where it names none."""
    if device == "cpu" or config.cluster.gpu_memory_gb is not None:
        return config
    cluster = config.cluster.model_copy(update={"gpu_memory_gb": hardware.memory_bytes.value / 1e9})
    return config.model_copy(update={"cluster": cluster})


@dataclass(frozen=True)
class PlanOutcome:
    """A plan with its time, and why it does not fit."""

    plan: Plan
    time: RunTime
    lacks: tuple[str, ...]
    """What is lacking, in words."""
    there: int
    """Bytes that a GPU has, or that are free on the host."""

    def nearest_fit(self) -> Change | None:
        """Return the nearest change that fits in this memory; None if it fits already, or nothing does."""
        config, device = self.plan.config, self.plan.device
        if needed(config, self.plan.memory, device) <= self.there:
            return None
        return nearest_fit(config, self.plan.shape, device, self.there)


def outcome(given: PlanRequest) -> PlanOutcome:
    """Plan ``given``. Raises PlanError for a configuration that cannot work at all."""
    planned, config = given.planned(), given.config
    machine = Machine.of(given.hardware, planned.shape, given.device)
    there = _there(given)
    return PlanOutcome(
        planned, run_time(config, machine, given.lengths, planned.held_out), tuple(_lacks(given, planned, there)), there
    )


def _there(given: PlanRequest) -> int:
    """Return the bytes that a GPU has, or that are free on the host."""
    if given.device == "cpu":
        return host_memory().free
    assert given.config.cluster.gpu_memory_gb is not None
    return int(given.config.cluster.gpu_memory_gb * 1e9)


def _lacks(given: PlanRequest, planned: Plan, there: int) -> list[str]:
    """Return what is lacking: memory of a GPU or the host, of a node, disk."""
    config, shape, found = given.config, planned.shape, []
    if (wanted := needed(config, planned.memory, given.device)) > there:
        of = "a GPU has" if given.device == "cuda" else "this machine has free"
        found.append(f"the run needs about {gib(wanted)} of memory, and {of} {gib(there)}")
    if given.device == "cuda":
        has = int(given.hardware.node_memory_bytes.value)
        node = node_memory(config, shape, int(given.hardware.node_devices.value))
        if node.each > has:
            found.append(
                f"a node needs about {gib(node.each)} of host memory, and has {gib(has)}; "
                "checkpoint.asynchronous=false saves the copies"
            )
    if _runs_here(given) and (short := disk_short(config, shape)):
        found.append(short)
    return found


def _runs_here(given: PlanRequest) -> bool:
    """Return whether the plan is for this machine, as far as its GPU tells: then its disk is the run's."""
    if given.device == "cpu":
        return True
    return torch.cuda.is_available() and hardware_of(torch.cuda.get_device_name()) == given.hardware


def show(given: PlanRequest, fix: Path | None, drawn: Path | None, as_json: bool) -> None:
    """Print one plan, and draw a step of it to ``drawn``; exit with USER_ERROR if it does not fit."""
    found = outcome(given)
    change, typical = found.nearest_fit(), found.time.longest.typical
    if drawn is not None:
        write_atomically(drawn, svg(typical, given.path.stem).encode(), "the picture of a step")
    if as_json:
        nearest = None if change is None else dict(change)
        print(
            json.dumps(as_dict(given.config, found.plan, found.time, found.lacks) | {"nearest_fit": nearest}, indent=2)
        )
    else:
        console = Console()
        console.print(render(found.plan))
        here = _runs_here(given)
        console.print(time_tables(given.config, found.plan, found.time, given.hardware, given.lengths, here))
        console.print(picture(typical))
    if found.lacks:
        _refuse(given, found.lacks, change, fix, as_json)


def _refuse(given: PlanRequest, lacks: Sequence[str], change: Change | None, fix: Path | None, as_json: bool) -> None:
    if not as_json:
        for line in lacks:
            note(f"does not fit: {line}")
        if change is not None:
            note(f"the nearest change that fits: {_set(change)}")
    if fix is not None and change is not None:
        write_fix(given, change, fix)
        note(f"wrote {fix}")
        return
    raise typer.Exit(USER_ERROR)


def _set(change: Mapping[str, Any]) -> str:
    return " ".join(f"--set {key}={json.dumps(value)}" for key, value in change.items())


def write_fix(given: PlanRequest, change: Change, path: Path) -> None:
    """Write a configuration that changes ``given`` so; its base is the file that was planned."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    lines = [f"base: {given.path.resolve()}"]
    lines += [f"{name}: {json.dumps(values)}" for name, values in sections.items()]
    write_atomically(path, ("\n".join(lines) + "\n").encode(), "the fixed configuration")


def compare(given: PlanRequest, what_if: Sequence[str], as_json: bool) -> None:
    """Print two plans side by side."""
    from or1_megatron.plan.tables import side_by_side

    sides = {"as it is": outcome(given), " ".join(what_if): outcome(given.with_overrides(what_if))}
    if as_json:
        print(
            json.dumps(
                [as_dict(each.plan.config, each.plan, each.time, each.lacks) for each in sides.values()], indent=2
            )
        )
        return
    Console().print(side_by_side({name: (each.time, each.lacks) for name, each in sides.items()}))


def search_layouts(given: PlanRequest, gpus: int | None, out: Path | None, as_json: bool) -> None:
    """Print the layouts that fit, fastest first, and write the best to ``out``."""
    from or1_megatron.plan.search import layout_yaml, search
    from or1_megatron.plan.tables import ranking
    from or1_megatron.weights.families import read_hf_config
    from or1_megatron.weights.shape import Shape

    if given.device == "cpu":
        raise ConfigError("--search is for GPUs; name them with --gpu")
    shape = Shape.of(read_hf_config(given.folder or given.config.model.hf))
    machine = Machine.of(given.hardware, shape, given.device)
    found = search(given.config, machine, given.lengths, gpus)
    if not found:
        raise ConfigError(f"no layout on {gpus or given.config.parallel.ranks} GPUs fits; take more or larger GPUs")
    if as_json:
        print(json.dumps([{"hours": each.hours, "change": dict(each.change)} for each in found], indent=2))
    else:
        Console().print(ranking(found))
    if out is not None:
        title = f"{given.config.model.hf.name} on {gpus or given.config.parallel.ranks} x {given.hardware.title}"
        write_atomically(out, layout_yaml(found[0], title, given.config), "the layout")
        note(f"wrote {out}")


def calibrate_runs(runs: Sequence[Path], gpu: str, out: Path | None) -> None:
    """Fit the constants of ``gpu`` to finished runs; print what is left, and write the file."""
    from or1_megatron.config.hardware import hardware_yaml
    from or1_megatron.plan.calibrate import calibrate, read_run
    from or1_megatron.plan.tables import residuals

    found = calibrate([read_run(run) for run in runs], read_hardware(gpu))
    Console().print(residuals(found))
    if out is not None:
        write_atomically(out, hardware_yaml(found.hardware).encode(), "the hardware file")
        note(f"wrote {out}")
