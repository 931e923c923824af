"""``or1 selftest``: tests this machine. ``or1_megatron.selftest`` runs the checks, in its own processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from or1_megatron.commands.explained import explained
from or1_megatron.runtime.nvidia_driver import check_driver

if TYPE_CHECKING:
    from or1_megatron.selftest.one_check import CheckOutcome


def selftest(
    checks: Annotated[list[str] | None, typer.Argument(help="Names of checks; without any, all.")] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and stop.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for selftest.json, selftest.txt and logs.")] = Path("selftest"),
    minutes: Annotated[float, typer.Option(help="End after so many minutes.")] = 10.0,
) -> None:
    """Try this machine: devices, kernels, layouts, checkpoints, handoff, engines, sandbox, a short run.

    Writes a report that can be attached to an issue. Exits with 1 when a check fails or had no time; what is not
    possible here does not count.
    """
    console = Console(highlight=False)
    with explained():
        from or1_megatron.selftest.known_checks import chosen
        from or1_megatron.selftest.run_checks import run_checks

        wanted = chosen(checks or ())
        if list_checks:
            for check in wanted:
                needs = f" (needs {', '.join(check.needs)})" if check.needs else ""
                console.print(f"[bold]{check.name}[/]: {check.proves}{needs}", soft_wrap=True)
            return
        check_driver()
        show = partial(_show, console)
        try:
            report = run_checks(wanted, out, minutes=minutes, show=show)
        except SystemExit:  # a signal
            console.print(f"stopped; what was found until then: {out / 'selftest.txt'}", soft_wrap=True)
            raise
    console.print(f"report: {out / 'selftest.txt'} and selftest.json beside it", soft_wrap=True)
    failed = report.ended("failed")
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red", soft_wrap=True)
    raise typer.Exit(1 if failed else 0)


def _show(console: Console, outcome: CheckOutcome) -> None:
    from or1_megatron.selftest.outcome_report import lines_of

    first, *others = lines_of(outcome)
    style = {"passed": "green", "failed": "red"}.get(outcome.status, "yellow")
    console.print(first, style=style, soft_wrap=True, markup=False)
    for line in others:
        console.print(line, style="yellow" if line.startswith("  !") else None, soft_wrap=True, markup=False)
