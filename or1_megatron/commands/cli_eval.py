"""``or1 eval``: its options. ``eval`` does the work."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from or1_megatron.commands.errors import explained
from or1_megatron.runtime.driver import check_driver

_DAY = "%Y-%m-%d"


def evaluate(
    model: Annotated[str, typer.Option(help="An HF folder, a Megatron checkpoint, or http://host:port/v1.")] = "",
    data: Annotated[
        str, typer.Option(help="aime24, livecodebench, math500, ..., a problem file or folder, a hub id.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Responses, results, picture; the same command resumes it. --compare: its page."),
    ] = None,
    k: Annotated[
        int | None, typer.Option(min=1, help="Samples per problem; the report's for its sets, else 1.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A file of configs/eval; else the paper's settings.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="E.g. --set max_response_tokens=8192.")
    ] = None,
    since: Annotated[
        datetime.datetime | None, typer.Option(formats=[_DAY], help="Only problems from this day on.")
    ] = None,
    until: Annotated[
        datetime.datetime | None, typer.Option(formats=[_DAY], help="Only problems up to this day's midnight.")
    ] = None,
    sets: Annotated[Path, typer.Option(help="Where known sets are looked for before the hub.")] = Path("data/eval"),
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Compare two finished evaluations instead.")
    ] = None,
) -> None:
    """Measure avg@k and pass@k of MODEL on DATA, with intervals, by response length and by context budget."""
    with explained():
        if compare is not None:
            from or1_megatron.commands.eval import compare_evaluations

            given = {"model": model, "data": data, "k": k, "config": config, "set": overrides}
            _refuse({**given, "since": since, "until": until})
            compare_evaluations(*compare, out, Console())
            return
        missing = [f"--{name}" for name, value in (("model", model), ("data", data), ("out", out)) if not value]
        if missing or out is None:
            raise typer.BadParameter(f"expected {', '.join(missing)} (or --compare A B)")
        if not model.startswith(("http://", "https://")):  # engines of our own
            check_driver()
        from or1_megatron.commands.eval import evaluate_model
        from or1_megatron.config.load import load_as
        from or1_megatron.evaluate.settings import EvaluationSettings

        settings = load_as(EvaluationSettings, config, overrides or ())
        days = [None if day is None else day.date() for day in (since, until)]
        evaluate_model(model, data, k, out, settings, Console(), sets, *days)


def _refuse(others: Mapping[str, object]) -> None:
    """Raise BadParameter for options that say nothing about a comparison."""
    if given := [f"--{name}" for name, value in others.items() if value]:
        raise typer.BadParameter(f"--compare takes no {', '.join(given)}; expected --out alone beside it")
