"""``or1 check-parity``: compares parallel layouts with transformers on a user's model (``selftest.checks.layouts``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.commands.explained import explained
from or1_megatron.runtime.nvidia_driver import check_driver

if TYPE_CHECKING:
    from or1_megatron.config.schema import ModelConfig


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
        from or1_megatron.config.schema import ModelConfig

        code = measure_layouts(
            ModelConfig(hf=model, dtype=dtype),
            layouts or (),
            Console(),
            tolerance=tolerance,
            out=out,
            objective=objective,
            args=parameters(args or ()),
        )
    raise typer.Exit(code)


def parameters(given: Iterable[str]) -> dict[str, Any]:
    """Return the objective's parameters from arguments NAME=VALUE. Raises ConfigError."""
    from or1_megatron.config.base import ConfigError
    from or1_megatron.config.yaml_reader import read_value

    values = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--arg {text}: expected NAME=VALUE")
        values[name] = read_value(value, f"--arg {text}")
    return values


def measure_layouts(
    model: ModelConfig,
    layouts: Sequence[str],
    console: Console,
    *,
    tolerance: float = 1.0,
    out: Path | None = None,
    **settings: Any,
) -> int:
    """Measure parallel layouts, print a table, and return the exit status: 0 when all agree with transformers.

    Args:
        layouts, settings: the arguments of ``task_of``. For an objective with a fault, only the fault is printed.
        tolerance: multiplies ``TOLERANCE``.
        out: the JSON file for the differences.

    Raises:
        ConfigError, LayoutError, ModelError: before any rank starts.
    """
    from or1_megatron.rl.objectives.check import faults, probe_objective
    from or1_megatron.selftest.checks.layouts import differences, task_of

    task = task_of(model, layouts, lambda sentence: console.print(f"left out: {sentence}", style="yellow"), **settings)
    wrong = list(faults(probe_objective(model.dtype, task["objective"], task["args"])))
    for line in wrong:
        console.print(f"objective {task['objective']}: {line}", style="red", soft_wrap=True)
    if wrong:
        return 1
    status, rows = differences(task, tolerance)
    show(rows, model.dtype, tolerance, console)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1))
    for row in rows:
        for line in row["beyond"]:
            console.print(f"{row['name']}: {line}", style="red", soft_wrap=True)
    missing = task["layouts"][len(rows) :]
    if missing:
        console.print(f"not measured: {', '.join(missing)}", style="red")
    return status or int(bool(missing) or any(row["beyond"] for row in rows))


def show(rows: Sequence[Mapping[str, Any]], dtype: str, tolerance: float, console: Console) -> None:
    """Print a table of the layouts' largest differences from transformers + torch, by kind."""
    from or1_megatron.selftest.checks.layouts import TOLERANCE, bounds, kind_in_words

    kinds = TOLERANCE[dtype]
    title = f"Largest difference from transformers + torch ({dtype})"
    limits = bounds(rows[0]["rounding"], dtype, tolerance) if rows else kinds
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
