"""``or1 ablate``: see ``or1_megatron.ablate``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from or1_megatron.commands.errors import explained

if TYPE_CHECKING:
    from or1_megatron.ablate.ablation import Arms
    from or1_megatron.ablate.runs import ArmRun


def ablate(
    number: Annotated[int | None, typer.Argument(help="Which ablation; without it, list all.")] = None,
    scale: Annotated[
        Literal["small", "paper"], typer.Option(help="small: on 2 CPU cores; paper: as in the report.")
    ] = "small",
    out: Annotated[Path, typer.Option(help="Folder of runs, logs and pages.")] = Path("runs/ablations"),
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the ablations' files; default: those of this package.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override in every arm, e.g. for a short run."),
    ] = None,
    page_only: Annotated[bool, typer.Option("--page", help="Only write the page of the finished runs.")] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Only print the commands of the runs, for a cluster.")
    ] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="One step of every stage, the first seed only.")] = False,
    background: Annotated[bool, typer.Option("--background", help="Run in the background, with OUT/NN.log.")] = False,
) -> None:
    """Run the arms of an ablation seed by seed, and write its page. Running it again does not repeat finished runs.

    An ablation may have conditions of entry, which a run measures first; unless they are met, the arms do not run.
    Exits with 1 if a run failed, in which case the other runs continue, or if a condition is not met.
    """
    from or1_megatron.ablate.ablation import arms_of, differences, load_ablations
    from or1_megatron.ablate.outcome import measure
    from or1_megatron.ablate.page import write_page
    from or1_megatron.ablate.runs import entry_runs, runs_of
    from or1_megatron.config.recipes import CONFIGS

    console = Console()
    with explained():
        found = load_ablations(folder or CONFIGS / "ablations")
        if number is None:
            rows = [[str(n), a.title, ", ".join(a.small.arms), ", ".join(a.paper.arms)] for n, a in found.items()]
            _print_table(console, ["", "ablation", "arms (small)", "arms (paper)"], rows)
            return
        if number not in found:
            raise typer.BadParameter(f"no ablation {number}; there are {sorted(found)}", param_hint="NUMBER")
        if background:
            _in_background(out / f"{number:02d}.log", console)
            return
        ablation = found[number]
        arms = arms_of(ablation, scale, _extra(overrides), smoke)
        seeds = ablation.at(scale).seeds[: 1 if smoke else None]
        runs = runs_of(arms, seeds, out / "smoke" if smoke else out)
        entry = [] if smoke else entry_runs(ablation.at(scale), arms, out)
        if commands:
            for run in [*entry, *runs]:
                print(shlex.join(["or1", *run.command()[3:]]))
            return
        differing = [[key, *values] for key, values in differences(arms).items()]
        _print_table(console, ["key", *(arm.name for arm in arms)], differing, "What differs between the arms")
        done = page_only or _run_all(ablation.at(scale), entry, runs, number, console)
        measured = measure(ablation.at(scale), _finished(entry))
        finished = {arm.name: {run.seed: run.rows() for run in runs if run.arm is arm and run.finished} for arm in arms}
        command = f"or1 ablate {number}" + ("" if scale == "small" else f" --scale {scale}")
        command += "".join(f" --set {override}" for override in overrides or ())
        pages = out / ("smoke/pages" if smoke else "pages")
        console.print(f"{write_page(ablation, scale, arms, finished, pages, command, measured)}")
    raise typer.Exit(0 if done else 1)


def _run_all(chosen: Arms, entry: list[ArmRun], runs: list[ArmRun], number: int, console: Console) -> bool:
    """Run what is not finished: first what measures the conditions of entry, then, if they are met, the arms.

    Return whether all has been run; say what has not.
    """
    from or1_megatron.ablate.outcome import measure

    failed = _run(entry, console)
    unmet = [each for each in measure(chosen, _finished(entry)) if entry and not each.met]
    if not unmet:
        failed += _run(runs, console)
    for run in failed:
        print(f"or1: ablation {number}: {run.arm.name}, seed {run.seed} failed; see {run.log}", file=sys.stderr)
    for each in unmet:
        print(f"or1: ablation {number}: {each}; its arms are not run", file=sys.stderr)
    return not failed and not unmet


def _finished(entry: list[ArmRun]) -> dict[str, list[dict[str, Any]]]:
    return {run.arm.name: run.rows() for run in entry if run.finished}


def _run(runs: list[ArmRun], console: Console) -> list[ArmRun]:
    """Run what is not finished, and return the runs that failed."""
    from or1_megatron.ablate.runs import run_all

    failed = []
    for done, (run, status) in enumerate(run_all(runs), start=1):
        console.print(f"{done}: {run.arm.name}, seed {run.seed}: {f'exit status {status}' if status else 'done'}")
        if status:
            failed.append(run)
    return failed


def _extra(overrides: list[str] | None) -> dict[str, Any]:
    from or1_megatron.config.yaml_reader import read_value

    extra = {}
    for override in overrides or ():
        key, equals, text = override.partition("=")
        if not equals:
            raise typer.BadParameter(f"'{override}': expected key.subkey=value", param_hint="--set")
        extra[key] = read_value(text, f"--set {override}")
    return extra


def _print_table(console: Console, heads: list[str], rows: list[list[str]], title: str | None = None) -> None:
    table = Table(*heads, title=title, title_justify="left", box=None)
    for row in rows:
        table.add_row(*row)
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
