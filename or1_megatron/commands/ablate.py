"""``or1 ablate``: see ``or1_megatron.ablate``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from rich.console import Console
from rich.table import Table

from or1_megatron.commands.errors import explained

if TYPE_CHECKING:
    from or1_megatron.ablate.ablation import Ablation, Arm, Arms, Scale
    from or1_megatron.ablate.campaign import Campaign
    from or1_megatron.ablate.runs import ArmRun
    from or1_megatron.ablate.spent import Spent


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
    every: Annotated[
        bool, typer.Option("--all", help="All ablations of campaign.yaml, the most important first.")
    ] = False,
    hours: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Begin no run once the runs in OUT, of earlier calls too, have taken so many hours."
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="How many runs to run at once; one where an ablation compares seconds."),
    ] = 1,
    kept: Annotated[
        Path | None,
        typer.Option(help="Folder of the finished runs' metrics; default: OUT/kept."),
    ] = None,
    background: Annotated[bool, typer.Option("--background", help="Run in the background, with OUT/NN.log.")] = False,
) -> None:
    """Run the arms of an ablation seed by seed, and write its page. Running it again does not repeat finished runs.

    What the arms begin with is made first where it is missing. An ablation may have conditions of entry, which a run
    measures first, with --all those of every ablation; unless they are met, its arms do not run. Exits with 1 if a run
    failed, in which case the other runs continue, if a condition is not met, or if the hours are used up.
    """
    from or1_megatron.ablate.ablation import differences, load_ablations
    from or1_megatron.ablate.campaign import load_campaign
    from or1_megatron.ablate.outcome import read_metrics
    from or1_megatron.ablate.spent import Spent
    from or1_megatron.config.recipes import CONFIGS

    console = Console()
    with explained():
        place = folder or CONFIGS / "ablations"
        found = load_ablations(place)
        campaign = load_campaign(place, found)
        if number is None and not every:
            rows = [[str(n), a.title, ", ".join(a.small.arms), ", ".join(a.paper.arms)] for n, a in found.items()]
            _print_table(console, ["", "ablation", "arms (small)", "arms (paper)"], rows)
            return
        if number is not None and (every or number not in found):
            wrong = f"{number} and --all: give one of the two" if every else f"no ablation {number}"
            raise typer.BadParameter(f"{wrong}; there are {sorted(found)}", param_hint="NUMBER")
        if background:
            _in_background(out / ("campaign.log" if every else f"{number:02d}.log"), console)
            return
        numbers = campaign.order if every or number is None else [number]
        todo = [_Todo.of(found[n], scale, out, kept or out / "kept", _extra(overrides), smoke) for n in numbers]
        if commands:
            _print_commands(todo, campaign)
            return
        spent = Spent(out / "smoke/kept" if smoke else kept or out / "kept", hours)
        runner = _ArmRunner(spent, read_metrics(found.values()), console)
        ready = [] if page_only else [each for each in todo if _made(campaign.missing(each.unfinished), out, runner)]
        done = page_only or len(ready) == len(todo)
        runner.run([run for each in ready for run in each.entry], jobs)
        for each in todo:
            differing = [[key, *values] for key, values in differences(each.arms).items()]
            _print_table(console, ["key", *(arm.name for arm in each.arms)], differing, "What differs between the arms")
            if each in ready:
                done &= _run_arms(each, runner, jobs)
            command = f"or1 ablate {each.ablation.number}" + ("" if scale == "small" else f" --scale {scale}")
            command += "".join(f" --set {override}" for override in overrides or ())
            console.print(f"{each.write_page(scale, out / ('smoke/pages' if smoke else 'pages'), command)}")
        if every:
            _print_table(console, ["", "ablation", "runs finished"], [each.row() for each in todo], "Campaign")
            console.print(f"{runner.spent.seconds / 3600:.2f} machine-hours in {out}")
    raise typer.Exit(0 if done else 1)


@dataclass(frozen=True)
class _Todo:
    """An ablation at a scale, with its runs."""

    ablation: Ablation
    chosen: Arms
    arms: list[Arm]
    entry: list[ArmRun]
    runs: list[ArmRun]

    @classmethod
    def of(cls, ablation: Ablation, scale: Scale, out: Path, kept: Path, extra: Mapping[str, Any], smoke: bool) -> Self:
        """Raises ConfigError when an arm's configuration is wrong."""
        from or1_megatron.ablate.ablation import arms_of
        from or1_megatron.ablate.runs import entry_runs, runs_of

        chosen, arms = ablation.at(scale), arms_of(ablation, scale, extra, smoke)
        if smoke:
            return cls(ablation, chosen, arms, [], runs_of(arms, chosen.seeds[:1], out / "smoke"))
        entry = entry_runs(chosen, arms, out, kept)
        return cls(ablation, chosen, arms, entry, runs_of(arms, chosen.seeds, out, kept))

    def write_page(self, scale: Scale, folder: Path, command: str) -> Path:
        from or1_megatron.ablate.outcome import measure
        from or1_megatron.ablate.page import write_page

        finished = {
            arm.name: {run.seed: run.rows() for run in self.runs if run.arm is arm and run.finished}
            for arm in self.arms
        }
        measured = measure(self.chosen, self.entry_rows)
        return write_page(self.ablation, scale, self.arms, finished, folder, command, measured)

    @property
    def entry_rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return {arm: rows of the run that measures its conditions of entry}."""
        return {run.arm.name: run.rows() for run in self.entry if run.finished}

    @property
    def unfinished(self) -> list[Arm]:
        return [run.arm for run in [*self.entry, *self.runs] if not run.finished]

    def row(self) -> list[str]:
        finished = sum(run.finished for run in self.runs)
        return [str(self.ablation.number), self.ablation.title, f"{finished} of {len(self.runs)}"]


def _print_commands(todo: list[_Todo], campaign: Campaign) -> None:
    """Print the command of each unfinished run once, after what makes the arms' beginnings; those of entry first."""
    every = [*(run for each in todo for run in each.entry), *(run for each in todo for run in each.runs)]
    runs = {run.dir: run for run in every if not run.finished}
    missing = campaign.missing([run.arm for run in runs.values()])
    print("\n".join([*missing.values(), *(shlex.join(["or1", *run.command()[3:]]) for run in runs.values())]))


@dataclass(frozen=True)
class _ArmRunner:
    """Runs what is not finished, within the budget, and says how each run ended."""

    spent: Spent
    metrics: list[str]
    """Those that are kept of a finished run."""
    console: Console
    failed: set[Path] = field(default_factory=set)
    """The folders of the runs that failed."""

    def run(self, runs: list[ArmRun], jobs: int) -> None:
        from or1_megatron.ablate.runs import run_all

        for done, (run, status) in enumerate(run_all(runs, self.spent, self.metrics, jobs), start=1):
            how = f"exit status {status}" if status else "done"
            self.console.print(f"{done}: {run.arm.name}, seed {run.seed}: {how}")
            if status:
                self.failed.add(run.dir)


def _made(missing: Mapping[str, str], out: Path, runner: _ArmRunner) -> bool:
    """Make what the arms begin with, and return whether all of it exists; say what does not."""
    from or1_megatron.ablate.campaign import make

    for path, command in missing.items():
        if runner.spent.used_up:
            print(f"or1: the hours are used up; {path} is not made", file=sys.stderr)
            return False
        runner.console.print(f"making {path}: {command}", soft_wrap=True)
        if not make(path, command, out, runner.spent):
            print(f"or1: {path} was not made by: {command}; see {out / 'makes.log'}", file=sys.stderr)
            return False
    return True


def _run_arms(todo: _Todo, runner: _ArmRunner, jobs: int) -> bool:
    """Run the arms if the conditions of entry are met. Return whether all has been run; say what has not."""
    from or1_megatron.ablate.outcome import measure, reads_seconds

    number = todo.ablation.number
    unmet = [each for each in measure(todo.chosen, todo.entry_rows) if todo.entry and not each.met]
    if not unmet:
        runner.run(todo.runs, 1 if reads_seconds(todo.chosen) else jobs)
    failed = [run for run in [*todo.entry, *todo.runs] if run.dir in runner.failed and not run.finished]
    for run in failed:
        print(f"or1: ablation {number}: {run.arm.name}, seed {run.seed} failed; see {run.log}", file=sys.stderr)
    if runner.spent.used_up and not all(run.finished for run in [*todo.entry, *todo.runs]):
        print(f"or1: ablation {number}: the hours are used up; what is not finished is left out", file=sys.stderr)
        return False
    for each in unmet:
        print(f"or1: ablation {number}: {each}; its arms are not run", file=sys.stderr)
    return not failed and not unmet


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
