"""``or1 selftest``: its options, and what it prints. ``or1_megatron.selftest`` does the work, in its own processes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from or1_megatron.commands.errors import explained
from or1_megatron.runtime.driver import check_driver

if TYPE_CHECKING:
    from or1_megatron.selftest.one_check import Check, CheckOutcome

_MARKS = {
    "passed": "[green]passed[/]",
    "failed": "[red]failed[/]",
    "not possible": "[yellow]not possible here[/]",
    "not started": "[yellow]not started[/]",
}


def selftest(
    checks: Annotated[list[str] | None, typer.Argument(help="Names of checks; without any, all.")] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and stop.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for selftest.json, selftest.md and logs.")] = Path("selftest"),
    nodes: Annotated[int, typer.Option(min=1, help="Nodes on which it runs, under torchrun, Slurm or by hand.")] = 1,
    devices: Annotated[
        int | None, typer.Option(min=1, help="At most so many GPUs; on CPU, so many processes (2).")
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Measure longer, for figures to be published.")] = False,
    minutes: Annotated[float, typer.Option(help="End after so many minutes.")] = 10.0,
) -> None:
    """Try this machine, or these nodes: devices, kernels, layouts, checkpoints, handoff, engines, sandbox, a short run.

    Writes a report that can be attached to an issue. Exits with 1 when a check fails or had no time; what is not
    possible here does not count.
    """
    console = Console(highlight=False)
    with explained():
        from or1_megatron.selftest.known_checks import chosen
        from or1_megatron.selftest.meeting import extra_process, meet
        from or1_megatron.selftest.run_checks import run_checks

        wanted = chosen(checks or (), long)
        if list_checks:
            for check in wanted if checks else chosen((), True):
                needs = f"; needs {', '.join(check.needs)}" if check.needs else ""
                console.print(f"[bold]{check.name}[/]: {check.proves} ({check.look_at}{needs})", soft_wrap=True)
            return
        if extra_process(os.environ):
            return
        check_driver()
        meeting = meet(nodes) if nodes > 1 else {}
        folder = out / f"node_{meeting['RANK']}" if meeting else out
        try:
            report = run_checks(
                wanted,
                folder,
                meeting=meeting,
                nodes=nodes,
                devices=devices,
                long=long,
                minutes=minutes,
                tell=partial(_tell, console),
            )
        except SystemExit:  # a signal
            console.print(f"stopped; what was found until then: {folder / 'selftest.md'}", soft_wrap=True)
            raise
    console.print(f"report: {folder / 'selftest.md'} and selftest.json beside it", soft_wrap=True)
    failed, not_started = report.ended("failed"), report.ended("not started")
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}[/]", soft_wrap=True)
    if not_started:
        console.print(f"[yellow]not started, for lack of time: {', '.join(not_started)}[/]", soft_wrap=True)
    raise typer.Exit(1 if failed or not_started else 0)


def _tell(console: Console, check: Check, outcome: CheckOutcome) -> None:
    from or1_megatron.selftest.one_check import shown
    from or1_megatron.selftest.report_page import WITH_REASON

    seconds = f"  {outcome.seconds:.1f} s" if outcome.seconds else ""
    reason = f"  {outcome.reason}" if outcome.status in WITH_REASON else ""
    console.print(f"{check.name:16}{_MARKS[outcome.status]}{seconds}{reason}", soft_wrap=True)
    for name, entry in outcome.figures.items():
        remark = f"expected {entry['limit']}" if "limit" in entry else entry.get("follows", "")
        as_expected = entry.get("met", entry.get("status", "ok") == "ok")
        style = None if as_expected else "red" if entry.get("required") else "yellow"
        line = f"    {name}: {shown(entry['value'], entry['unit'])}{f'  ({remark})' if remark else ''}"
        console.print(line, style=style, soft_wrap=True, markup=False)
    if outcome.status == "failed":
        console.print(f"    {outcome.reason}. Look at {check.look_at}.", style="red", soft_wrap=True, markup=False)
        for line in outcome.last_lines:
            console.print(f"    | {line}", soft_wrap=True, markup=False)
