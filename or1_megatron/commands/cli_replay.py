"""``or1 replay``: its options. ``replay`` does the work and imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from or1_megatron.commands.errors import explained
from or1_megatron.runtime.driver import check_driver


def replay(
    dump: Annotated[Path, typer.Argument(help="A folder in a run's dumps/.")],
    layout: Annotated[
        str, typer.Option(metavar="LAYOUT", help="E.g. 'TP2 PP2'; 1: one process; run: as in the run that dumped it.")
    ] = "1",
    model: Annotated[Path | None, typer.Option(help="HF folder of the weights, if not those in the dump.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative, of loss and gradient norm; by default what the dtype needs.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON too.")] = None,
) -> None:
    """Repeat a dumped SGD step at any layout: loss, gradient norm, and where log-probs are not finite.

    Exits with 1, and says what differs, when the results are not those of the run.
    """
    with explained():
        check_driver()
        from or1_megatron.commands.replay import replay as repeat

        code = repeat(dump, layout, model, tolerance, Console(), out)
    raise typer.Exit(code)
