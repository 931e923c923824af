"""``or1 plan-handoff``: its options. ``plan_handoff`` does the work and imports torch."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import ConfigFile, Overrides, config_file, shape_folder


def plan_handoff(
    config: ConfigFile,
    overrides: Overrides = None,
    gigabits: Annotated[float, typer.Option(help="Speed of each rank's link, per direction, in Gb/s.")] = 400.0,
) -> None:
    """Print who would send which bytes of the weights to whom with handoff.backend: shard. Starts nothing."""
    with explained():
        from or1_megatron.commands.plan_handoff import forecast_of, print_forecast
        from or1_megatron.config.load import load_config

        loaded = load_config(config_file(config), overrides or ())
        if shape := shape_folder(loaded):
            loaded = loaded.model_copy(update={"model": loaded.model.model_copy(update={"hf": shape})})
        print_forecast(forecast_of(loaded), gigabits, Console())
