"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set stages.0.steps=3. Repeatable."),
]
RunDir = Annotated[Path, typer.Argument(help="A run folder.")]
