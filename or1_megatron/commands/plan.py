"""``or1 plan``: prints the memory, disk and time that a configuration will need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from or1_megatron.commands.explained import explained
from or1_megatron.commands.options import Overrides, config_file, note, shape_folder
from or1_megatron.errors import USER_ERROR

if TYPE_CHECKING:
    from or1_megatron.config.hardware import Hardware
    from or1_megatron.config.schema import Config
    from or1_megatron.plan.request import PlanRequest


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file or a recipe.")],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Hardware: h100, h200, h800, h800_2025, a100, a800, cpu, or a file."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take the response lengths of this past run. Unset: the recipe's."),
    ] = None,
    shape: Annotated[
        Path | None, typer.Option(metavar="NAME|FOLDER", help="Plan for this model shape; reads no data.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what CONFIG will need and how long it will take. Starts nothing.

    Exits with status 2 if it does not fit in memory, or on the disk of this machine.
    """
    with explained():
        _show(_asked(config, overrides or (), gpu, lengths, shape), as_json)


def _asked(
    config: Path, overrides: Sequence[str], gpu: str | None, lengths: Path | None, shape: Path | None
) -> PlanRequest:
    """Return the plan request that the options describe. Raises ConfigError, LengthsError, ModelError."""
    from or1_megatron.config.hardware import read_hardware
    from or1_megatron.config.load import load_config
    from or1_megatron.config.recipes import find
    from or1_megatron.plan.lengths import read_lengths
    from or1_megatron.plan.request import PlanRequest

    loaded = load_config(config_file(config), overrides)
    hardware = read_hardware(gpu) if gpu else _hardware_for(loaded)
    folder = find("shape", shape) if shape else shape_folder(loaded)
    if hardware.match and loaded.cluster.gpu_memory_gb is None:
        cluster = loaded.cluster.model_copy(update={"gpu_memory_gb": hardware.memory_bytes.value / 1e9})
        loaded = loaded.model_copy(update={"cluster": cluster})
    return PlanRequest(loaded, folder, hardware, read_lengths(lengths))


def _hardware_for(config: Config) -> Hardware:
    """Return this machine's GPU, or else a GPU with the memory ``cluster.gpu_memory_gb``, or else the CPU."""
    import torch

    from or1_megatron.config.hardware import hardware_of, read_hardware
    from or1_megatron.config.load import ConfigError

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        hardware = hardware_of(name)
        if hardware is None:
            raise ConfigError(f"no hardware file is known for {name}; name one with --gpu")
        return hardware
    size_gb = config.cluster.gpu_memory_gb
    if size_gb is None:
        return read_hardware("cpu")
    named = "h200" if size_gb > 100 else "h800"
    note(f"planned for {named}, since cluster.gpu_memory_gb is {size_gb:g}; --gpu names another")
    return read_hardware(named)


def _show(given: PlanRequest, as_json: bool) -> None:
    """Print the plan, and exit with USER_ERROR if the run does not fit."""
    from or1_megatron.plan.request import outcome
    from or1_megatron.plan.tables import as_dict, render, time_tables

    planned, time, lacks = outcome(given)
    if as_json:
        print(json.dumps(as_dict(planned, time, lacks), indent=2))
    else:
        console = Console()
        console.print(render(planned))
        console.print(time_tables(given, planned, time))
        for line in lacks:
            note(f"does not fit: {line}")
    if lacks:
        raise typer.Exit(USER_ERROR)
