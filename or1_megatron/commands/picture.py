"""``or1 picture``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import RunDir


def picture(
    run: RunDir,
    out: Annotated[Path, typer.Argument(help="The picture to write, an .svg file.")],
) -> None:
    """Draw a run: accuracy, entropy against its target, length and truncation over the steps."""
    with explained(FileNotFoundError, ValueError):
        from or1_megatron.report.figures.run_picture import draw_run

        draw_run(run, out)
