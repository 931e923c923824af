"""`or1 check-parity`: does every layout compute what one plain process computes, on the user's own model?

The ranks (``parallel.check_parity``) are started once, as many as the largest layout takes. This process reads what
they measured and compares it with the tolerances.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.commands.errors import explained
from or1_megatron.runtime.driver import check_driver

if TYPE_CHECKING:
    from or1_megatron.config.schema import ModelConfig


TOLERANCE: Final = {
    "float32": {
        "log_prob": 1e-5,
        "entropy": 1e-5,
        "loss": 1e-5,
        "grad_norm": 1e-4,
        "gradient": 1e-4,
        "parameters": 1e-3,
    },
    "bfloat16": {
        "log_prob": 0.25,
        "entropy": 0.25,
        "loss": 0.01,
        "grad_norm": 0.1,
        "gradient": 0.15,
    },
}
"""Largest tolerated difference of each kind (``parallel.parity.Deviation``).

In bfloat16 it is due to rounding: the reference computes in fp32 on the rounded weights. What three steps move is less
than bf16 can show, so it is left out, and their losses and norms show only that an update takes a gradient."""

_GRACE_S: Final = 10.0


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
        from or1_megatron.config.schema import ModelConfig

        code = measure_layouts(
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


def default_layouts(longest: int) -> tuple[str, ...]:
    """Return each kind of parallelism, two mixtures, other rows and another order; ``longest`` is in tokens."""
    kinds = ("1", "TP2", "PP2", "TP2 SP", "PP2 VPP2", "CP2", "DP2", "DP2 distopt", "TP2 PP2", "TP2 CP2")
    return (*kinds, f"1 rows{2 * longest}", f"1 rows{3 * longest + longest // 3} shuffled")


@dataclass(frozen=True)
class LayoutResult:
    """One line of the table."""

    name: str
    micro_batches: int
    difference: Mapping[str, Any]
    """A ``parallel.parity.Deviation``."""
    beyond: tuple[str, ...]
    """A sentence for each difference that exceeds its bound."""


def measure_layouts(
    model: ModelConfig,
    layouts: Sequence[str],
    console: Console,
    *,
    sequences: int = 24,
    longest: int = 48,
    seed: int = 1,
    tolerance: float = 1.0,
    out: Path | None = None,
    objective: str = "clipped",
    args: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Measure layouts, print a table, and return the exit status: 0 when all agree with the reference.

    Args:
        layouts: what to measure (``parallel_layouts.parse_layout``); one that the model does not allow is an error.
            Empty: ``default_layouts``, of which those that the model does not allow are named and left out.
        sequences: in the probe, of up to ``longest`` tokens each.
        tolerance: multiplies ``TOLERANCE``.
        out: where to write the numbers as JSON.
        objective, args: as in ``probe_objective``. Nothing is measured of an objective with a fault, which is named.

    Raises:
        ConfigError, LayoutError, ModelError: before any rank starts.
    """
    from or1_megatron.rl.objectives.check import faults, probe_objective
    from or1_megatron.sizing.conflicts import layout_conflicts
    from or1_megatron.sizing.parallel_layouts import LayoutError, parse_layout
    from or1_megatron.weights.families import read_hf_config
    from or1_megatron.weights.files import check_weight_files
    from or1_megatron.weights.shape import Shape

    wrong = list(faults(probe_objective(model.dtype, objective, args)))
    for line in wrong:
        console.print(f"objective {objective}: {line}", style="red", soft_wrap=True)
    if wrong:
        return 1
    hf = read_hf_config(model.hf)
    check_weight_files(model.hf, hf)
    names, ranks = [], 1
    for name in layouts or default_layouts(longest):
        case = parse_layout(name, longest)
        conflicts = "; ".join(layout_conflicts(case.parallel, Shape.of(hf)))
        if conflicts and layouts:
            raise LayoutError(f"layout '{name}' cannot work: {conflicts}")
        if conflicts:
            console.print(f"left out: {name}: {conflicts}", style="yellow")
        else:
            names.append(name)
            ranks = max(ranks, case.parallel.ranks)
    task = {"model": model.model_dump(mode="json"), "objective": objective, "args": dict(args), "layouts": names}
    status, found = _measure({**task, "sequences": sequences, "longest": longest, "seed": seed}, ranks)
    rows = [LayoutResult(**row, beyond=tuple(beyond(row["difference"], model.dtype, tolerance))) for row in found]
    show(rows, model.dtype, tolerance, console)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for row in rows:
        for line in row.beyond:
            console.print(f"{row.name}: {line}", style="red", soft_wrap=True)
    missing = names[len(rows) :]
    if missing:
        console.print(f"not measured: {', '.join(missing)}", style="red")
    return status or int(bool(missing) or any(row.beyond for row in rows))


def _measure(task: Mapping[str, Any], ranks: int) -> tuple[int, list[dict[str, Any]]]:
    """Run the ranks; return (their exit status, what they measured before they ended)."""
    from or1_megatron.runtime.launch import run_ranks

    with tempfile.TemporaryDirectory(prefix="or1-parity-") as folder:
        todo, found = Path(folder, "task.json"), Path(folder, "found.json")
        todo.write_text(json.dumps(task))
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # torch's and Megatron's, once per rank
        status = run_ranks(
            "or1_megatron.parallel.check_parity",
            [str(todo), str(found)],
            ranks=ranks,
            threads_per_rank=1,
            grace_s=_GRACE_S,
            task="the comparison",
            advice=".",
        )
        return status, json.loads(found.read_text()) if found.is_file() else []


def show(rows: Sequence[LayoutResult], dtype: str, tolerance: float, console: Console) -> None:
    """Print the largest differences of each kind from transformers + torch."""
    kinds = TOLERANCE[dtype]
    title = f"Largest difference from transformers + torch ({dtype})"
    bounds = [f"{_shown(kind)}\n≤ {bound * tolerance:.0e}" for kind, bound in kinds.items()]
    table = Table(
        Column("layout\n", no_wrap=True),
        Column("rows\nper rank", justify="right"),
        *(Column(bound, justify="right", no_wrap=True) for bound in bounds),
        "",
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for row in rows:
        values = [f"{row.difference[kind]:.1e}" for kind in kinds]
        table.add_row(row.name, str(row.micro_batches), *values, "differs" if row.beyond else "equal")
    console.width = max(console.width, 110)  # a pipe's 80 columns would cut the figures
    console.print(table)


def _shown(kind: str) -> str:
    return {"log_prob": "log-prob", "parameters": "3 steps"}.get(kind, kind.replace("_", " "))


def beyond(difference: Mapping[str, Any], dtype: str, tolerance: float) -> Iterator[str]:
    """Yield a sentence for each difference (a ``Deviation``) that exceeds its bound, with the worst tensor's name."""
    for kind, bound in TOLERANCE[dtype].items():
        value = difference[kind]
        if not value <= bound * tolerance:
            where = difference.get(f"{kind}_at", "")
            yield (
                f"{_shown(kind)}{' of ' + where if where else ''} differs by {value:.2e}; "
                f"expected at most {bound * tolerance:.0e}"
            )
