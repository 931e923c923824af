"""``or1 config``."""

from __future__ import annotations

from typing import Annotated

import typer

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import ConfigFile, Overrides, config_file


def config(
    config: ConfigFile,
    overrides: Overrides = None,
    key: Annotated[str | None, typer.Option(help="Print the value of this key alone, e.g. parallel.ranks.")] = None,
) -> None:
    """Print the whole configuration, overlays, overrides and defaults included."""
    with explained():
        from or1_megatron.config.load import load_config, resolved_yaml, value_of

        loaded = load_config(config_file(config), overrides or ())
        print(resolved_yaml(loaded).rstrip() if key is None else value_of(loaded, key))
