"""``or1 doctor``: the quick checks of the self-test, as a table of what this machine has and what follows from it.

Only something missing that stops training makes the exit status non-zero.
"""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Column, Table

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "missing": "[red]missing[/]"}


def doctor() -> None:
    """Say what this machine has and lacks, and what follows from it."""
    from or1_megatron.selftest.known_checks import CHECKS
    from or1_megatron.selftest.one_check import CheckOutcome, Context

    columns = [Column(name, overflow="fold") for name in ("", "what", "found", "what follows")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    stopping: list[str] = []
    for check in CHECKS:
        if check.quick:
            outcome = CheckOutcome(check.name, "passed")
            check(Context(outcome))
            for name, entry in outcome.figures.items():
                table.add_row(_MARKS[entry["status"]], name, entry["value"], entry["follows"])
            stopping += [name for name, entry in outcome.figures.items() if entry["stops"]]
    console = Console()
    console.print(table)
    console.print(f"Training cannot start here: {', '.join(stopping)}." if stopping else "Training can start here.")
    raise typer.Exit(1 if stopping else 0)
