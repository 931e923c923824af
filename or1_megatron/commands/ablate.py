"""``or1 ablate``: see ``or1_megatron.ablate``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

FOLDER = Path("configs/ablations")


def ablate(
    number: Annotated[int | None, typer.Argument(help="Which; without it, the list of all.")] = None,
    scale: Annotated[str, typer.Option(help="small: on 2 CPU cores; paper: as the report has it.")] = "small",
    out: Annotated[Path, typer.Option(help="Runs, logs and pages.")] = Path("runs/ablations"),
    folder: Annotated[Path, typer.Option(help="Where the ablations' files are.")] = FOLDER,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Laid over every arm, e.g. for a smoke run.")
    ] = None,
    page_only: Annotated[bool, typer.Option("--page", help="Run nothing; write the page of what there is.")] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print the commands of the runs, for a cluster.")
    ] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="One step of every stage, the first seed only.")] = False,
    background: Annotated[bool, typer.Option("--background", help="Go on by itself, writing to OUT/NN.log.")] = False,
) -> None:
    """Run the arms of an ablation, seed by seed, and write its page. Finished runs are not repeated: run it again.

    Exits with 1 when a run failed; the others go on.
    """
    from or1_megatron.ablate.ablation import SCALES, arms_of, differences, load_ablations
    from or1_megatron.ablate.page import write_page
    from or1_megatron.ablate.runs import run_all, runs_of
    from or1_megatron.commands.errors import explained

    if scale not in SCALES:
        raise typer.BadParameter(f"'{scale}' is neither paper nor small", param_hint="--scale")
    console = Console()
    with explained():
        found = load_ablations(folder)
        if number is None:
            _list(found, console)
            return
        if number not in found:
            raise typer.BadParameter(f"no ablation {number}; there are {sorted(found)}", param_hint="NUMBER")
        if background:
            _in_background(out / f"{number:02d}.log", console)
            return
        ablation = found[number]
        arms = arms_of(ablation, scale, _extra(overrides), smoke)  # type: ignore[arg-type]  # checked above
        seeds = ablation.at(scale).seeds[: 1 if smoke else None]  # type: ignore[arg-type]
        runs = runs_of(arms, seeds, out / "smoke" if smoke else out)
        if commands:
            for run in runs:
                print(shlex.join(["or1", *run.command()[3:]]))
            return
        _print_differences(differences(arms), [arm.name for arm in arms], console)
        failed = []
        for done, (run, status) in enumerate([] if page_only else run_all(runs), start=1):
            console.print(
                f"{done}: {run.arm.name}, seed {run.seed}: {'done' if status == 0 else f'exit status {status}'}"
            )
            if status != 0:
                failed.append(run)
        rows = {arm.name: {run.seed: run.rows() for run in runs if run.arm is arm and run.finished} for arm in arms}
        command = f"or1 ablate {number}" + ("" if scale == "small" else f" --scale {scale}")
        command += "".join(f" --set {override}" for override in overrides or ())
        page = write_page(ablation, scale, arms, rows, out / ("smoke/pages" if smoke else "pages"), command)  # type: ignore[arg-type]
        console.print(f"{page}")
        for run in failed:
            print(f"or1: ablation {number}: {run.arm.name}, seed {run.seed} failed; see {run.log}", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def _extra(overrides: list[str] | None) -> dict[str, Any]:
    from or1_megatron.config.yaml_reader import read_value

    extra = {}
    for override in overrides or ():
        key, equals, text = override.partition("=")
        if not equals:
            raise typer.BadParameter(f"'{override}': expected key.subkey=value", param_hint="--set")
        extra[key] = read_value(text, f"--set {override}")
    return extra


def _list(found: dict[int, Any], console: Console) -> None:
    table = Table("", "ablation", "arms (small)", "arms (paper)", box=None)
    for number, ablation in found.items():
        table.add_row(str(number), ablation.title, ", ".join(ablation.small.arms), ", ".join(ablation.paper.arms))
    console.print(table)


def _print_differences(rows: dict[str, list[str]], names: list[str], console: Console) -> None:
    table = Table("key", *names, title="What differs between the arms", title_justify="left", box=None)
    for key, values in rows.items():
        table.add_row(key, *values)
    console.print(table)


def _in_background(log: Path, console: Console) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [argument for argument in sys.argv[1:] if argument != "--background"]
    with log.open("a") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "or1_megatron.commands.app", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "120"},
        )
    console.print(f"running as process {process.pid}; its log: {log}")
