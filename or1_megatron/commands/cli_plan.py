"""``or1 plan``: its options. ``plan`` does the work and imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import Overrides


def plan(
    paths: Annotated[
        list[Path], typer.Argument(metavar="CONFIG", help="A YAML file or a recipe; with --calibrate, run folders.")
    ],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Hardware: h800, h100, h200, a100, a800, cpu, or a hardware file."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs for --search. Unset: those of CONFIG.")] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|RUN", help="Response lengths: a file, or a past run's rollouts. Unset: the recipe's."
        ),
    ] = None,
    shape: Annotated[
        Path | None, typer.Option(metavar="NAME|FOLDER", help="Plan for this model shape; reads no data.")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", metavar="KEY=VALUE", help="A second plan beside. Repeatable.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the layouts that fit, and rank them by hours.")
    ] = False,
    fix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write CONFIG with the nearest change that fits in memory.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where --search writes the best layout, --calibrate its file.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the constants of --gpu to the metrics of run folders.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write who is busy when in one step, an .svg file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what CONFIG will need and how long it will take. Starts nothing.

    Exits with status 2 if it does not fit in memory, or on the disk of this machine.
    """
    with explained():
        from or1_megatron.commands import plan as work

        if calibrate:
            work.calibrate_runs(paths, gpu or "cpu", out)
            return
        if len(paths) != 1:
            raise typer.BadParameter("expected one CONFIG", param_hint="CONFIG")
        asked = work.asked(paths[0], overrides or (), gpu, lengths, shape)
        if search:
            work.search_layouts(asked, gpus, out, as_json)
        elif what_if:
            work.compare(asked, what_if, as_json)
        else:
            work.show(asked, fix, picture, as_json)
