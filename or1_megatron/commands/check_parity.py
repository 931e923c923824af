"""``or1 check-parity``: compares parallel layouts with transformers on a user's model (``selftest.checks.layouts``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.commands.user_errors import report_user_errors
from or1_megatron.runtime.nvidia_driver import check_driver


def check_parity(
    model: Annotated[Path, typer.Argument(help="An HF folder.")],
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="E.g. 'TP2 PP2 SP', repeatable; without any: all kinds of parallelism. Words: TPn PPn VPPn CPn DPn SP "
            "distopt full selective one_pass overlap bucketsN layers=3+1 rowsN shuffled; 1 for none.",
        ),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the model.")] = "float32",
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

    Names each difference, and exits with 1 if there is any. For a faulty objective, prints only the faults and exits
    with 1.
    """
    with report_user_errors():
        check_driver()
        from or1_megatron.config.schema import ModelConfig
        from or1_megatron.rl.objectives.loss_faults import faults, probe_objective
        from or1_megatron.selftest.checks.layouts import differences, task_of

        console, values = Console(), parameters(args or ())
        wrong = list(faults(probe_objective(dtype, objective, values)))
        for line in wrong:
            console.print(f"objective {objective}: {line}", style="red", soft_wrap=True)
        if wrong:
            raise typer.Exit(1)
        left_out = partial(console.print, "left out:", style="yellow")
        settings = ModelConfig(hf=model, dtype=dtype)
        task = task_of(settings, layouts or (), left_out, objective=objective, args=values)
        rows, wrong = differences(task)
    show(rows, dtype, console)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1))
    for line in wrong:
        console.print(line, style="red", soft_wrap=True)
    raise typer.Exit(int(bool(wrong)))


def parameters(given: Iterable[str]) -> dict[str, Any]:
    """Return the objective's parameters from arguments NAME=VALUE. Raises ConfigError for any other argument."""
    from or1_megatron.config.base import ConfigError
    from or1_megatron.config.yaml_reader import read_value

    values = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--arg {text}: expected NAME=VALUE")
        values[name] = read_value(value, f"--arg {text}")
    return values


def show(rows: Sequence[Mapping[str, Any]], dtype: str, console: Console) -> None:
    """Print a table of differences from transformers + torch: for each layout, the largest one of each kind."""
    from or1_megatron.selftest.checks.layouts import TOLERANCE, bounds, kind_in_words

    kinds = TOLERANCE[dtype]
    title = f"Largest difference from transformers + torch ({dtype})"
    limits = bounds(rows[0]["rounding"], dtype) if rows else kinds
    heads = [f"{kind_in_words(kind)}\n≤ {limit:.0e}" for kind, limit in limits.items()]
    table = Table(
        Column("layout\n", no_wrap=True),
        Column("rows\nper rank", justify="right"),
        *(Column(head, justify="right", no_wrap=True) for head in heads),
        Column("times\nrounding", justify="right"),
        "",
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for row in rows:
        values = [f"{row['difference'][kind]:.1e}" for kind in kinds]
        values.append(f"{row['times']:.1f}")
        table.add_row(row["name"], str(row["micro_batches"]), *values, "differs" if row["beyond"] else "equal")
    console.width = max(console.width, 110)  # a pipe's 80 columns would cut the figures
    console.print(table)
