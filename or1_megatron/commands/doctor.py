"""``or1 doctor``: prints what this machine has and lacks for training; its subcommand looks into a run's mismatch."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.commands.doctor_mismatch import mismatch

doctor = typer.Typer(invoke_without_command=True)
doctor.command()(mismatch)
_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "missing": "[red]missing[/]"}


@doctor.callback()
def machine(context: typer.Context) -> None:
    """Print what this machine has and lacks for training, and what follows. Exits with 1 if training cannot start."""
    if context.invoked_subcommand is not None:
        return
    from or1_megatron.selftest.known_checks import MACHINE
    from or1_megatron.selftest.one_check import CheckOutcome, Context

    outcome = CheckOutcome(MACHINE.name, "passed")
    MACHINE(Context(outcome))
    columns = [Column(name, overflow="fold") for name in ("", "what", "found", "what follows")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for name, entry in outcome.figures.items():
        table.add_row(_MARKS[entry["status"]], name, entry["value"], entry["follows"])
    console = Console()
    console.print(table)
    missing = [name for name, entry in outcome.figures.items() if entry["status"] == "missing"]
    console.print(f"Training cannot start here: {', '.join(missing)}." if missing else "Training can start here.")
    raise typer.Exit(1 if missing else 0)
