"""``or1 config``: prints the resolved configuration, or explains its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from or1_megatron.commands.options import Overrides, config_file
from or1_megatron.commands.user_errors import report_user_errors


def config(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG|KEY", help="A YAML file or a recipe's name; with --explain: a key or section."),
    ] = None,
    overrides: Overrides = None,
    key: Annotated[str | None, typer.Option(help="Print the value of this key alone, e.g. parallel.ranks.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what KEY means, or without KEY what every key means.")
    ] = False,
) -> None:
    """Print the whole configuration, overlays, overrides and defaults included; or explain its keys.

    or1 config or1_7b; or1 config or1_7b --key parallel.ranks; or1 config --explain optimizer.lr
    """
    with report_user_errors():
        if explain:
            from or1_megatron.config.explain import explain as text_of

            print(text_of(None if config is None else str(config)))
            return
        from or1_megatron.config.load import load_config, resolved_yaml, value_of

        if config is None:
            raise typer.BadParameter("missing; only --explain works without it", param_hint="CONFIG")
        loaded = load_config(config_file(config), overrides or ())
        print(resolved_yaml(loaded).rstrip() if key is None else value_of(loaded, key))
