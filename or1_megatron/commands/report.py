"""``or1 report``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

Explained = Callable[..., AbstractContextManager[None]]


def report_command(explained: Explained) -> Callable[..., None]:
    """The command. ``explained`` turns errors into messages (cli.explained)."""

    def report(
        runs: Annotated[
            list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are laid over another.")
        ],
        out: Annotated[
            Path | None, typer.Option(help="The page to write; report.html in the folder of a lone run, else here.")
        ] = None,
        ids: Annotated[
            list[str] | None,
            typer.Option(
                metavar="PROBLEM[/STEP[/SAMPLE]]",
                help="Show these responses in full too; PROBLEM may be its first digits. Repeatable, or with commas.",
            ),
        ] = None,
        texts: Annotated[
            int, typer.Option(min=0, max=200, help="Responses that are chosen to be shown in full.")
        ] = 200,
        tokenizer: Annotated[
            Path | None,
            typer.Option(help="HF folder of the runs' tokenizer, if neither they nor their model have one."),
        ] = None,
    ) -> None:
        """Draw RUN... as one HTML page: curves, times, lengths, pass rates of problems, and the responses."""
        from or1_megatron.runtime.run_folder import USER_OS_ERRORS

        with explained(FileNotFoundError, ValueError, *USER_OS_ERRORS):
            from or1_megatron.report.page.run_page import write_report

            path = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
            named = [each for given in ids or () for each in given.split(",") if each]
            written = write_report(runs, path, ids=named, tokenizer=tokenizer, texts=texts)
            for note in written.notes:
                print(f"or1: note: {note}", file=sys.stderr)
            listed = f"{written.rows:,} responses" + (f" of {written.all_rows:,}" * (written.rows < written.all_rows))
            print(f"{path}: {listed}, {written.texts} in full, {written.size_bytes / 1e6:.1f} MB")

    return report
