"""``or1 rollouts``: shows a run's sampled responses on the console."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from or1_megatron.commands.explained import explained
from or1_megatron.commands.options import RunDir


def rollouts(
    run: RunDir,
    step: Annotated[int | None, typer.Option(help="The step to show; the newest if not given.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many responses to show.")] = 8,
    status: Annotated[str | None, typer.Option(help="Only those with this verdict, e.g. wrong or truncated.")] = None,
) -> None:
    """Show sampled responses with their verdicts and advantages."""
    with explained(FileNotFoundError, ValueError):
        from or1_megatron.report.console.rollouts import show_rollouts

        show_rollouts(run, step=step, limit=limit, status=status, console=Console())
