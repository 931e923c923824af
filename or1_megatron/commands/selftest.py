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
    from or1_megatron.selftest.one_check import CheckOutcome


def selftest(
    checks: Annotated[list[str] | None, typer.Argument(help="Names of checks; without any, all.")] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and stop.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for selftest.json, selftest.txt and logs.")] = Path("selftest"),
    nodes: Annotated[int, typer.Option(min=1, help="Nodes on which it runs, one process on each.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option(min=0, envvar=["GROUP_RANK", "SLURM_NODEID", "NODE_RANK"], help="This node's number.")
    ] = None,
    master_addr: Annotated[str | None, typer.Option(envvar="MASTER_ADDR", help="Name or address of node 0.")] = None,
    master_port: Annotated[int, typer.Option(envvar="MASTER_PORT", help="Port of node 0 at which they meet.")] = 29500,
    minutes: Annotated[float, typer.Option(help="End after so many minutes.")] = 10.0,
) -> None:
    """Try this machine, or these nodes: devices, kernels, layouts, checkpoints, handoff, engines, sandbox, a short run.

    Writes a report that can be attached to an issue. Exits with 1 when a check fails or had no time; what is not
    possible here does not count.
    """
    console = Console(highlight=False)
    with explained():
        from or1_megatron.selftest.known_checks import chosen
        from or1_megatron.selftest.run_checks import meeting_of, run_checks

        wanted = chosen(checks or ())
        if list_checks:
            for check in wanted:
                needs = f" (needs {', '.join(check.needs)})" if check.needs else ""
                console.print(f"[bold]{check.name}[/]: {check.proves}{needs}", soft_wrap=True)
            return
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
            return  # one process of a node is enough
        check_driver()
        meeting: dict[str, str] = {}
        if nodes > 1:
            if node_rank is None or master_addr is None or node_rank >= nodes:
                hint = "expected on every node --node-rank, from 0 and below --nodes, and --master-addr of node 0"
                raise typer.BadParameter(hint, param_hint="--nodes")
            meeting = meeting_of(nodes, node_rank, master_addr, master_port)
        folder = out / f"node_{meeting['RANK']}" if meeting else out
        show = partial(_show, console)
        try:
            report = run_checks(wanted, folder, meeting=meeting, minutes=minutes, show=show)
        except SystemExit:  # a signal
            console.print(f"stopped; what was found until then: {folder / 'selftest.txt'}", soft_wrap=True)
            raise
    console.print(f"report: {folder / 'selftest.txt'} and selftest.json beside it", soft_wrap=True)
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
