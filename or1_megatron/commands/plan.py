"""``or1 plan``: reads what a plan needs, and prints it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import Overrides, config_file, note, shape_folder
from or1_megatron.errors import USER_ERROR
from or1_megatron.runtime.files import write_atomically

if TYPE_CHECKING:
    from or1_megatron.config.hardware import Hardware
    from or1_megatron.config.schema import Config
    from or1_megatron.plan.nearest import Change
    from or1_megatron.plan.request import PlanRequest
    from or1_megatron.sizing.conflicts import Device


def plan(
    paths: Annotated[
        list[Path], typer.Argument(metavar="CONFIG", help="A YAML file or a recipe; with --calibrate, run folders.")
    ],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Hardware: h800, h100, h200, a100, a800, cpu, or a hardware file."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs for --search. Unset: those of CONFIG.")] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|RUN", help="Response lengths: a file, or a past run's rollouts. Unset: the recipe's."
        ),
    ] = None,
    shape: Annotated[
        Path | None, typer.Option(metavar="NAME|FOLDER", help="Plan for this model shape; reads no data.")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", metavar="KEY=VALUE", help="A second plan beside. Repeatable.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the layouts that fit, and rank them by hours.")
    ] = False,
    fix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write CONFIG with the nearest change that fits in memory.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where --search writes the best layout, --calibrate its file.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the constants of --gpu to the metrics of run folders.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write who is busy when in one step, an .svg file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what CONFIG will need and how long it will take. Starts nothing.

    Exits with status 2 if it does not fit in memory, or on the disk of this machine.
    """
    with explained():
        if calibrate:
            _calibrate_runs(paths, gpu or "cpu", out)
            return
        if len(paths) != 1:
            raise typer.BadParameter("expected one CONFIG", param_hint="CONFIG")
        given = _asked(paths[0], overrides or (), gpu, lengths, shape)
        if search:
            _search_layouts(given, gpus, out, as_json)
        elif what_if:
            _compare(given, what_if, as_json)
        else:
            _show(given, fix, picture, as_json)


def _asked(
    config: Path, overrides: Sequence[str], gpu: str | None, lengths: Path | None, shape: Path | None
) -> PlanRequest:
    """Read what the options name. Raises ConfigError, LengthsError and ModelError for what cannot be read."""
    from or1_megatron.config.hardware import read_hardware
    from or1_megatron.config.load import load_config
    from or1_megatron.config.recipes import find
    from or1_megatron.plan.lengths import read_lengths
    from or1_megatron.plan.request import PlanRequest, with_gpu_memory

    path = config_file(config)
    loaded = load_config(path, overrides)
    hardware = read_hardware(gpu) if gpu else _hardware_for(loaded)
    device: Device = "cuda" if hardware.match else "cpu"
    folder = find("shape", shape) if shape else shape_folder(loaded)
    loaded = with_gpu_memory(loaded, hardware, device)
    return PlanRequest(path, tuple(overrides), loaded, folder, hardware, device, read_lengths(lengths))


def _hardware_for(config: Config) -> Hardware:
    """Return this machine's GPU; without one, a GPU with the memory that the layout names, else the CPU."""
    import torch

    from or1_megatron.config.hardware import hardware_of, read_hardware
    from or1_megatron.config.load import ConfigError

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


def _show(given: PlanRequest, fix: Path | None, drawn: Path | None, as_json: bool) -> None:
    """Print one plan, and draw a step of it to ``drawn``; exit with USER_ERROR if it does not fit."""
    from or1_megatron.plan.picture import picture, svg
    from or1_megatron.plan.request import outcome, runs_here
    from or1_megatron.plan.tables import as_dict, time_tables
    from or1_megatron.sizing.plan_tables import render

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
        here = runs_here(given)
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
        _write_fix(given, change, fix)
        note(f"wrote {fix}")
        return
    raise typer.Exit(USER_ERROR)


def _set(change: Mapping[str, Any]) -> str:
    return " ".join(f"--set {key}={json.dumps(value)}" for key, value in change.items())


def _write_fix(given: PlanRequest, change: Change, path: Path) -> None:
    """Write a configuration that changes ``given`` so; its base is the file that was planned."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    lines = [f"base: {given.path.resolve()}"]
    lines += [f"{name}: {json.dumps(values)}" for name, values in sections.items()]
    write_atomically(path, ("\n".join(lines) + "\n").encode(), "the fixed configuration")


def _compare(given: PlanRequest, what_if: Sequence[str], as_json: bool) -> None:
    """Print two plans side by side."""
    from or1_megatron.plan.request import outcome
    from or1_megatron.plan.tables import as_dict, side_by_side

    sides = {"as it is": outcome(given), " ".join(what_if): outcome(given.with_overrides(what_if))}
    if as_json:
        print(
            json.dumps(
                [as_dict(each.plan.config, each.plan, each.time, each.lacks) for each in sides.values()], indent=2
            )
        )
        return
    Console().print(side_by_side({name: (each.time, each.lacks) for name, each in sides.items()}))


def _search_layouts(given: PlanRequest, gpus: int | None, out: Path | None, as_json: bool) -> None:
    """Print the layouts that fit, fastest first, and write the best to ``out``."""
    from or1_megatron.config.load import ConfigError
    from or1_megatron.plan.search import layout_yaml, search
    from or1_megatron.plan.step_time import Machine
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


def _calibrate_runs(runs: Sequence[Path], gpu: str, out: Path | None) -> None:
    """Fit the constants of ``gpu`` to finished runs; print what is left, and write the file."""
    from or1_megatron.config.hardware import hardware_yaml, read_hardware
    from or1_megatron.plan.calibrate import calibrate, read_run
    from or1_megatron.plan.tables import residuals

    found = calibrate([read_run(run) for run in runs], read_hardware(gpu))
    Console().print(residuals(found))
    if out is not None:
        write_atomically(out, hardware_yaml(found.hardware).encode(), "the hardware file")
        note(f"wrote {out}")
