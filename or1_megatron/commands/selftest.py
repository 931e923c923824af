"""``or1 selftest``: tests this machine. ``or1_megatron.selftest`` runs the checks, in its own processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from or1_megatron.commands.user_errors import report_user_errors
from or1_megatron.runtime.nvidia_driver import check_driver


def selftest(
    checks: Annotated[list[str] | None, typer.Argument(help="Names of checks; without any, all.")] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks and stop.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for selftest.json, selftest.txt and logs.")] = Path("selftest"),
    minutes: Annotated[float, typer.Option(help="End after so many minutes.")] = 10.0,
) -> None:
    """Try this machine: devices, kernels, layouts, checkpoints, handoff, engines, sandbox, a short run.

    Writes a report that can be attached to an issue. Exits with 1 when a check fails or had no time. Checks that
    are not possible here do not count.
    """
    with report_user_errors():
        from or1_megatron.selftest.known_checks import chosen
        from or1_megatron.selftest.run_checks import run_checks

        wanted = chosen(checks or ())
        if list_checks:
            for check in wanted:
                print(f"{check.name}: {check.proves}" + (f" (needs {', '.join(check.needs)})" if check.needs else ""))
            return
        check_driver()
        try:
            report = run_checks(wanted, out, minutes=minutes)
        except SystemExit:  # a signal
            print(f"stopped; what was found until then: {out / 'selftest.txt'}")
            raise
    print(f"report: {out / 'selftest.txt'} and selftest.json beside it")
    if failed := report.ended("failed"):
        print(f"failed: {', '.join(failed)}")
    raise typer.Exit(1 if failed else 0)
