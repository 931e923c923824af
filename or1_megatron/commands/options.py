"""Arguments and options that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from or1_megatron.config.schema import Config

ConfigFile = Annotated[Path, typer.Argument(help="A YAML file, or the name of a recipe (`or1 recipes` lists them).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set stages.0.steps=3. Repeatable."),
]
RunDir = Annotated[Path, typer.Argument(help="A run folder.")]


def config_file(given: Path) -> Path:
    """Return the configuration file for ``given``: this file if it exists, else the recipe of this name.

    If both exist, a note is printed. Raises ConfigError when there is neither.
    """
    from or1_megatron.config.recipes import find, named

    file = find("recipe", given)
    if file == given and (recipe := named("recipe").get(str(given))):
        note(f"{given} is a file here and is used; the recipe of that name is {recipe}")
    return file


def shape_folder(config: Config) -> Path | None:
    """Return None if the model's folder is present; otherwise print a note, and return the model shape to plan with.

    The shape is named like the folder. Raises ModelError when there is neither folder nor shape.
    """
    from or1_megatron.config.recipes import shape_like
    from or1_megatron.weights.families import ModelError

    model = config.model.hf
    if model.is_dir():
        return None
    shape = shape_like(model)
    if shape is None:
        raise ModelError(
            f"model folder {model} does not exist; expected an HF folder with config.json, or a shape to plan with: "
            "--set model.hf=NAME (`or1 recipes` lists the names)"
        )
    note(f"{model} is not there; planned with the shape {shape.name}")
    return shape


def note(text: str) -> None:
    print(f"or1: note: {text}", file=sys.stderr)
