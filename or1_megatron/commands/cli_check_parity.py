"""``or1 check-parity``: its options. ``check_parity`` does the work and imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from or1_megatron.commands.errors import explained
from or1_megatron.runtime.driver import check_driver


def check_parity(
    model: Annotated[Path, typer.Argument(help="An HF folder.")],
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="E.g. 'TP2 PP2 SP', repeatable; without any: all kinds of parallelism. Words: TPn PPn VPPn CPn DPn SP "
            "distopt full selective one_pass overlap overlap_gather bucketsN layers=3+1 rowsN shuffled; 1 for none.",
        ),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the model.")] = "float32",
    sequences: Annotated[int, typer.Option(min=1, help="How many sequences the probe has.")] = 24,
    longest: Annotated[int, typer.Option(min=4, help="Tokens of the probe's longest sequence, at most.")] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the probe.")] = 1,
    tolerance: Annotated[float, typer.Option(help="Multiplies the bounds, for a model deep enough to need it.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write the differences as JSON too.")] = None,
    objective: Annotated[
        str,
        typer.Option(metavar="NAME", help="As algorithm.objective.name; your own: package.module:Name."),
    ] = "clipped",
    args: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="NAME=VALUE", help="A parameter of the objective, repeatable; VALUE is YAML."),
    ] = None,
) -> None:
    """Compare layouts of MODEL with transformers + torch: log-probs, entropies, loss, gradients, three optimizer steps.

    Exits with 1 and names what differs when a layout computes something else.
    """
    with explained():
        check_driver()
        from or1_megatron.commands.check_parity import check_parity as check
        from or1_megatron.config.schema import ModelConfig

        code = check(
            ModelConfig(hf=model, dtype=dtype),
            layouts or (),
            Console(),
            sequences=sequences,
            longest=longest,
            seed=seed,
            tolerance=tolerance,
            out=out,
            objective=objective,
            args=parameters(args or ()),
        )
    raise typer.Exit(code)


def parameters(given: Iterable[str]) -> dict[str, Any]:
    """Return the objective's parameters from NAME=VALUE. Raises ConfigError."""
    from or1_megatron.config.base import ConfigError
    from or1_megatron.config.yaml_reader import read_value

    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--arg {text}: expected NAME=VALUE")
        found[name] = read_value(value, f"--arg {text}")
    return found
