"""``or1 verify``: its options. ``verify`` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import config_file


def verify(
    file: Annotated[Path, typer.Argument(help="Rows of problems (.jsonl, .parquet), each with a 'response'.")],
    out: Annotated[Path, typer.Option(help="The same rows with reward, status and detail; resumed, if begun.")],
    config: Annotated[Path | None, typer.Option(help="A YAML file or a recipe, for its verify section.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Rows judged at once.")] = 1,
    unusable: Annotated[
        Literal["refuse", "drop"],
        typer.Option(help="Rows that cannot be used. refuse: list them and stop; drop: give them the status error."),
    ] = "refuse",
    explain: Annotated[bool, typer.Option("--explain", help="Print why, row by row.")] = False,
) -> None:
    """Score recorded responses: ground truths as in training, 'truncated' optional. Prints a table by source."""
    with explained(IsADirectoryError):
        from or1_megatron.commands.verify import verify_file
        from or1_megatron.config.load import load_config
        from or1_megatron.config.schema import VerifyConfig

        settings = VerifyConfig() if config is None else load_config(config_file(config)).verify
        verify_file(file, out, settings, workers, unusable, explain, Console())
