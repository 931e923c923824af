"""``or1 verify``: prints what ``data.recorded_responses`` finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import config_file

if TYPE_CHECKING:
    from or1_megatron.data.recorded_responses import RecordedRow
    from or1_megatron.types import Verdict


def verify(
    file: Annotated[Path, typer.Argument(help="Rows of problems (.jsonl, .parquet), each with a 'response'.")],
    out: Annotated[Path, typer.Option(help="The same rows with reward, status and detail; resumed, if begun.")],
    config: Annotated[Path | None, typer.Option(help="A YAML file or a recipe, for its verify section.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Rows judged at once.")] = 1,
    unusable: Annotated[
        Literal["refuse", "drop"],
        typer.Option(help="Rows that cannot be used. refuse: list them and stop; drop: give them the status error."),
    ] = "refuse",
    explain: Annotated[bool, typer.Option("--explain", help="Print why, row by row.")] = False,
) -> None:
    """Score recorded responses: ground truths as in training, 'truncated' optional. Prints a table by source."""
    with explained(IsADirectoryError):
        from or1_megatron.config.load import load_config
        from or1_megatron.config.schema import VerifyConfig
        from or1_megatron.data.recorded_responses import verify_file
        from or1_megatron.verify.registry import build_verifiers, known_abilities

        settings = VerifyConfig() if config is None else load_config(config_file(config)).verify
        make = partial(build_verifiers, settings.model_copy(update={"workers": workers}))
        console = Console()

        def tell(row: RecordedRow, verdict: Verdict) -> None:
            if explain:
                _explain(console, row, verdict)

        tally = verify_file(file, out, make, known_abilities(settings), workers, unusable, tell)
        console.print(_table(tally))


def _explain(console: Console, row: RecordedRow, verdict: Verdict) -> None:
    from or1_megatron.data.rows import shown

    answer = shown(verdict.answer) if verdict.answer else "no answer"
    text = f"{row.origin}  {verdict.status}  {row.source}  {verdict.detail}  [{answer}]"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(tally: Mapping[str, Counter[str]]) -> Table:
    from or1_megatron.types import VerdictStatus

    statuses = [status for status in get_args(VerdictStatus) if any(counts[status] for counts in tally.values())]
    figures = [Column(name, justify="right", no_wrap=True) for name in ("rows", "reward", *statuses)]
    table = Table("source", *figures, box=None, padding=(0, 2, 0, 0))
    total: Counter[str] = sum(tally.values(), Counter())
    rows = [*sorted(tally.items()), *([("all", total)] if len(tally) > 1 else [])]
    for source, counts in rows:
        count = counts.total()
        table.add_row(source, str(count), f"{counts['right'] / count:.3f}", *(str(counts[name]) for name in statuses))
    return table
