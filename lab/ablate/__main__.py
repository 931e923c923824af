"""``python -m lab.ablate``: runs ablations and writes their pages. lab/ablations/README.md explains it."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lab.ablate.ablation import Ablation, Arm, Arms, Scale, arms_of, differences, load_ablations
from lab.ablate.outcome import measure, read_metrics, reads_seconds
from lab.ablate.page import write_page
from lab.ablate.runs import ArmRun, run_all, runs_of
from or1_megatron.commands.user_errors import report_user_errors
from or1_megatron.config.yaml_reader import read_value

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ablate(
    numbers: Annotated[
        list[int] | None, typer.Argument(help="Which ablations, in order; without them, list all.")
    ] = None,
    scale: Annotated[Scale, typer.Option(help="small: on 2 CPU cores; paper: as in the report.")] = "small",
    out: Annotated[Path, typer.Option(help="Folder of runs, logs and pages.")] = Path("runs/ablations"),
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="In every arm.")] = None,
    page: Annotated[bool, typer.Option("--page", help="Only write the page of the finished runs.")] = False,
    commands: Annotated[bool, typer.Option("--commands", help="Only print the commands of the runs.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once; one where an ablation compares seconds.")] = 1,
    kept: Annotated[Path | None, typer.Option(help="Folder of finished runs' metrics; default: OUT/kept.")] = None,
) -> None:
    """Run the arms of ablations seed by seed, and write their pages. Finished runs are not repeated.

    An ablation may have conditions of entry. A run measures them first, and the arms run only if all are met. After a
    failed run the other runs continue. Exits with 1 if a run failed or a condition is not met.
    """
    signal.signal(signal.SIGTERM, lambda received, _: sys.exit(128 + received))
    kept, changed, failed = kept or out / "kept", overrides or [], False
    with report_user_errors():
        ablations = load_ablations()
        if not numbers:
            rows = [[str(n), a.title, ", ".join(a.small.arms), ", ".join(a.paper.arms)] for n, a in ablations.items()]
            _print_table(["", "ablation", "arms (small)", "arms (paper)"], rows)
            return
        if unknown := set(numbers) - set(ablations):
            raise typer.BadParameter(f"no ablation {min(unknown)}; there are {list(ablations)}", param_hint="NUMBERS")
        todo = [Work.of(ablations[number], scale, out, kept, _extra(changed)) for number in numbers]
        if commands:
            runs = {run.dir: run for work in todo for run in (*work.entry, *work.runs) if not run.finished}
            print("\n".join(shlex.join(["or1", *run.command()[3:]]) for run in runs.values()))
            return
        metrics = read_metrics(ablations.values())
        for work in todo:
            keys = [[key, *values] for key, values in differences(work.arms).items()]
            _print_table(["key", *(arm.name for arm in work.arms)], keys)
            wrong = [] if page else work.carry_out(metrics, jobs)
            for line in wrong:
                print(f"ablation {work.ablation.number}: {line}", file=sys.stderr)
            failed |= bool(wrong)
            command = f"python -m lab.ablate {work.ablation.number}" + ("" if scale == "small" else f" --scale {scale}")
            command += "".join(f" --set {override}" for override in changed)
            print(work.write_page(scale, out / "pages", command))
    raise typer.Exit(1 if failed else 0)


@dataclass(frozen=True)
class Work:
    """An ablation at one scale, with its runs."""

    ablation: Ablation
    chosen: Arms
    arms: list[Arm]
    entry: list[ArmRun]
    """The runs that measure the conditions of entry: one for each arm that a condition names."""
    runs: list[ArmRun]

    @classmethod
    def of(cls, ablation: Ablation, scale: Scale, out: Path, kept: Path, extra: dict[str, Any]) -> Work:
        """Make the work of an ablation. Raises ConfigError if an arm's configuration is wrong."""
        chosen, arms = ablation.at(scale), arms_of(ablation, scale, extra)
        named = {condition.arm for condition in chosen.entry}
        entry = runs_of([arm for arm in arms if arm.name in named], (chosen.entry_seed,), out, kept)
        return cls(ablation, chosen, arms, entry, runs_of(arms, chosen.seeds, out, kept))

    def entry_values(self) -> list[float | None]:
        return measure(self.chosen, {run.arm.name: run.rows() for run in self.entry if run.finished})

    def carry_out(self, metrics: list[str], jobs: int) -> list[str]:
        """Measure the conditions of entry, and run the arms if all conditions are met. ``metrics``: names of the
        metrics that are kept of finished runs. Return a sentence for each failed run and each unmet condition."""
        wrong = _run(self.entry, metrics, jobs)
        for condition, value in zip(self.chosen.entry, self.entry_values(), strict=True):
            if not condition.met(value):
                wrong.append(
                    f"condition '{condition.says}' is not met: {condition.metric} of arm '{condition.arm}' "
                    f"({condition.window}) is {'not measured' if value is None else f'{value:.4g}'}, "
                    f"expected {condition.bounds()}; its arms are not run"
                )
        return wrong or _run(self.runs, metrics, 1 if reads_seconds(self.chosen) else jobs)

    def write_page(self, scale: Scale, folder: Path, command: str) -> Path:
        finished = {
            arm.name: {run.seed: run.rows() for run in self.runs if run.arm is arm and run.finished}
            for arm in self.arms
        }
        return write_page(self.ablation, scale, self.arms, finished, self.entry_values(), folder, command)


def _run(runs: list[ArmRun], metrics: list[str], jobs: int) -> list[str]:
    """Run the runs that are not finished, and return a sentence for each failed run."""
    wrong = []
    for run, status in run_all(runs, metrics, jobs):
        print(f"{run.arm.name}, seed {run.seed}: {f'exit status {status}' if status else 'done'}", flush=True)
        if status:
            wrong.append(f"{run.arm.name}, seed {run.seed} failed; see {run.log}")
    return wrong


def _extra(overrides: list[str]) -> dict[str, Any]:
    extra = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise typer.BadParameter(f"'{override}': expected key.subkey=value", param_hint="--set")
        extra[key] = read_value(text, f"--set {override}")
    return extra


def _print_table(heads: list[str], rows: list[list[str]]) -> None:
    table = Table(*heads, box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    app()
