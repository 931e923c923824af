"""``or1 plan``: prints the memory, disk and time that a configuration will need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from or1_megatron.commands.options import Overrides, config_file, note, shape_folder
from or1_megatron.commands.user_errors import report_user_errors
from or1_megatron.errors import USER_ERROR

if TYPE_CHECKING:
    from or1_megatron.config.hardware import Hardware
    from or1_megatron.config.schema import Config
    from or1_megatron.sizing.run_plan import Plan


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

    Exits with status 2 if the run does not fit in memory, or on the disk of this machine.
    """
    with report_user_errors():
        from or1_megatron.config.hardware import read_hardware
        from or1_megatron.config.load import load_config
        from or1_megatron.config.recipes import find
        from or1_megatron.plan.lengths import read_lengths
        from or1_megatron.plan.run_time import run_time
        from or1_megatron.plan.step_time import Machine
        from or1_megatron.plan.tables import as_dict, render, time_tables
        from or1_megatron.rollout.engine_args import check_engine_args
        from or1_megatron.sizing.run_plan import plan_run

        loaded = load_config(config_file(config), overrides or ())
        hardware = read_hardware(gpu) if gpu else _hardware_for(loaded)
        folder = find("shape", shape) if shape else shape_folder(loaded)
        if hardware.match and loaded.cluster.gpu_memory_gb is None:
            cluster = loaded.cluster.model_copy(update={"gpu_memory_gb": hardware.memory_bytes.value / 1e9})
            loaded = loaded.model_copy(update={"cluster": cluster})
        check_engine_args(loaded.rollout)
        drawn = read_lengths(lengths, loaded.data.max_prompt_tokens)
        planned = plan_run(loaded, "cuda" if hardware.match else "cpu", folder)
        machine = Machine.of(hardware, planned.shape, planned.device)
        time = run_time(loaded, machine, drawn, planned.held_out)
        here = _is_here(hardware)
        lacks = _lacks(planned, here)
        if as_json:
            print(json.dumps(as_dict(planned, time, lacks), indent=2))
        else:
            console = Console()
            console.print(render(planned))
            console.print(time_tables(planned, time, hardware, drawn, here))
            for line in lacks:
                note(f"does not fit: {line}")
        if lacks:
            raise typer.Exit(USER_ERROR)


def _is_here(hardware: Hardware) -> bool:
    """Return whether a run would use this machine and its disk: the hardware is a CPU or this machine's GPU."""
    import torch

    from or1_megatron.config.hardware import hardware_of

    if not hardware.match:
        return True
    return torch.cuda.is_available() and hardware_of(torch.cuda.get_device_name()) == hardware


def _lacks(planned: Plan, here: bool) -> list[str]:
    """Return a text if memory is short and, if ``here`` (the run uses this machine), a text if the disk is short."""
    from or1_megatron.runtime.host_memory import host_memory
    from or1_megatron.sizing.memory import memory_short
    from or1_megatron.sizing.storage import disk_short

    config, shape = planned.config, planned.shape
    there = host_memory().free if planned.device == "cpu" else int((config.cluster.gpu_memory_gb or 0.0) * 1e9)
    lacks = [memory_short(config, shape, planned.device, there), disk_short(config, shape) if here else ""]
    return [line for line in lacks if line]


def _hardware_for(config: Config) -> Hardware:
    """Return this machine's GPU, or else a GPU chosen by ``cluster.gpu_memory_gb``, or else the CPU."""
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
