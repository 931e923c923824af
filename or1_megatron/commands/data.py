"""``or1 data``: builds training sets (``data.pipeline``), explains exclusions, and writes evaluation sets."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from or1_megatron.commands.user_errors import report_user_errors

if TYPE_CHECKING:
    from or1_megatron.data.pipeline.recipe import SampledModel

data = typer.Typer(no_args_is_help=True, help="Build a training set from published ones, and look into it.")

_FOLDER = typer.Option("--build", help="The build's folder: 'out' of its recipe.")
_DEFAULT = Path("runs/dataset")


@data.command("build")
def build_dataset(
    path: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set out=runs/mine. Repeatable."),
    ] = None,
) -> None:
    """Run RECIPE's steps, except steps that are done and have not changed. A build that was killed resumes."""
    with report_user_errors():
        from or1_megatron.commands.open_model import open_sampler
        from or1_megatron.config.load import load_as
        from or1_megatron.data.pipeline.build import build
        from or1_megatron.data.pipeline.recipe import Recipe

        loaded = load_as(Recipe, path, overrides or ())
        for section in (loaded.difficulty, loaded.judges):
            for model in () if section is None else section.models:
                _check_model(model)
        build(loaded, partial(open_sampler, say=_say), _say)


@data.command()
def why(
    problem: Annotated[str, typer.Argument(help="Its id or the first digits of it, or where it was: file:line.")],
    folder: Annotated[Path, _FOLDER] = _DEFAULT,
) -> None:
    """Print which step excluded a problem, the reason and the evidence; or that it was kept."""
    with report_user_errors():
        from or1_megatron.data.pipeline.build import why as look_up
        from or1_megatron.data.pipeline.records import Exclusion

        for step, outcome in look_up(folder, problem):
            row = outcome.candidate if isinstance(outcome, Exclusion) else outcome
            print(f"{row.id}  {row.source}  ({row.ability}, {row.origin})")
            print(f"  {' '.join(row.statement.split())[:200]}")
            if isinstance(outcome, Exclusion):
                print(f"  excluded by step '{step}': {outcome.reason}")
                for name, value in outcome.evidence.items():
                    print(f"    {name}: {value if isinstance(value, str) else json.dumps(value)}")
            else:
                print("  kept" + (f"; failures in 16: {row.difficulty}" if row.difficulty else ""))
                if row.notes.get("votes"):
                    print(f"    votes: {json.dumps(row.notes['votes'])}")


@data.command()
def benchmark(
    names: Annotated[list[str], typer.Argument(help="aime24, livecodebench, math500, ...: docs/evaluation.md.")],
    out: Annotated[Path, typer.Option(help="Folder for NAME.jsonl: EVAL of the recipes.")] = Path("data/eval"),
    sets: Annotated[Path, typer.Option(help="Where files of these sets lie; else they come from the hub.")] = Path(
        "data/benchmarks"
    ),
) -> None:
    """Write evaluation sets as the paper uses them: with prompt endings, and LiveCodeBench within the paper's dates."""
    with report_user_errors():
        from or1_megatron.evaluate.benchmarks import write_set

        for name in names:
            path, loaded = write_set(name, out, sets)
            print(f"{path}: {loaded}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_model(model: SampledModel) -> None:
    """Raise DataError if a model's folder or key is missing, before hours of other steps."""
    from or1_verify.problems.rows import DataError

    if model.hf is not None and not (model.hf / "config.json").is_file():
        raise DataError(f"model '{model.name}': {model.hf} is not an HF model folder (no config.json)")
    if model.api_key_variable is not None and not os.environ.get(model.api_key_variable):
        raise DataError(
            f"model '{model.name}': environment variable {model.api_key_variable}, which should hold its key, isn't set"
        )
