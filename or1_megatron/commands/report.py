"""``or1 report``: draws runs as an HTML page (``report.page``)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from or1_megatron.commands.user_errors import report_user_errors


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, drawn in the same charts.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write; default: report.html in the folder of a single run, else here."),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROBLEM[/STEP[/SAMPLE]]",
            help="Also show these responses in full; PROBLEM may be its first digits. Repeatable, or with commas.",
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=0, max=200, help="How many responses to choose and show in full.")] = 200,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="HF folder of the runs' tokenizer, if neither they nor their model have one."),
    ] = None,
) -> None:
    """Draw RUN... as one HTML page: curves, times, lengths, pass rates of problems, and the responses."""
    with report_user_errors(FileNotFoundError, ValueError):
        from or1_megatron.report.page.run_page import write_report

        path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
        named = [name for given in ids or () for name in given.split(",") if name]
        written = write_report(runs, path, ids=named, tokenizer=tokenizer, texts=texts)
        for note in written.notes:
            print(f"or1: note: {note}", file=sys.stderr)
        print(f"{path}: {written.rows:,} responses, {written.texts} in full, {written.size_bytes / 1e6:.1f} MB")
