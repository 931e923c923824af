"""``or1 data …``: build a training set, ask why a problem is not in it, draw what became of all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

Explained = Callable[..., AbstractContextManager[None]]

_FOLDER = typer.Option("--build", help="The build's folder: 'out' of its recipe.")
_DEFAULT = Path("runs/dataset")


def data_commands(explained: Explained) -> typer.Typer:
    """The command group. ``explained`` turns errors into messages (cli.explained)."""
    app = typer.Typer(no_args_is_help=True, help="Build a training set from published ones, and look into it.")

    @app.command()
    def build(
        recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set out=runs/mine. Repeatable."),
        ] = None,
        until: Annotated[str | None, typer.Option(help="Stop behind this step, e.g. decontaminate.")] = None,
    ) -> None:
        """Run RECIPE's steps; what has been done and has not changed is not done again. Killed, it goes on."""
        from or1_megatron.runtime.run_folder import USER_OS_ERRORS

        with explained(*USER_OS_ERRORS):
            from or1_megatron.commands.data_build import build_dataset

            build_dataset(recipe, tuple(overrides or ()), _say, until)

    @app.command()
    def why(
        problem: Annotated[str, typer.Argument(help="Its id or the first digits of it, or where it was: file:line.")],
        folder: Annotated[Path, _FOLDER] = _DEFAULT,
    ) -> None:
        """Say which step excluded a problem, for what reason and on what evidence; or that it was kept."""
        with explained():
            from or1_megatron.data.pipeline.ledger import Entry
            from or1_megatron.data.pipeline.ledger import why as look_up

            for row in look_up(folder, problem):
                print(f"{row.id}  {row.source}  ({row.ability}, {row.origin})")
                print(f"  {' '.join(row.statement.split())[:200]}")
                if isinstance(row, Entry):
                    print(f"  excluded by step '{row.step}': {row.reason}")
                    for name, value in row.evidence.items():
                        print(f"    {name}: {value if isinstance(value, str) else json.dumps(value)}")
                else:
                    print("  kept" + (f"; failures in 16: {row.difficulty}" if row.difficulty else ""))
                    if row.notes.get("votes"):
                        print(f"    votes: {json.dumps(row.notes['votes'])}")

    @app.command()
    def report(
        folder: Annotated[Path, typer.Argument(help="The build's folder.")] = _DEFAULT,
        out: Annotated[Path | None, typer.Option(help="The page to write; report.html in the folder.")] = None,
    ) -> None:
        """Draw the build as one HTML page: the funnel, the sources, lengths and difficulty."""
        with explained():
            from or1_megatron.data.pipeline.page import write_page

            path = out or folder / "report.html"
            write_page(folder, path)
            print(path)

    @app.command()
    def prune(folder: Annotated[Path, typer.Argument(help="The build's folder.")] = _DEFAULT) -> None:
        """Delete results of steps that the newest build does not use. Models' answers and votes stay."""
        with explained():
            from or1_megatron.data.pipeline.build import prune as delete

            for name in delete(folder):
                print(f"deleted {name}")

    @app.command()
    def benchmark(
        names: Annotated[list[str], typer.Argument(help="aime24, aime25, livecodebench.")],
        out: Annotated[Path, typer.Option(help="Folder for NAME.jsonl: EVAL of the recipes.")] = Path("data/eval"),
        sets: Annotated[Path, typer.Option(help="Where files of these sets lie; else they come from the hub.")] = Path(
            "data/benchmarks"
        ),
    ) -> None:
        """Write evaluation sets as the report used them: AIME24's ending, LiveCodeBench's months."""
        from or1_megatron.runtime.run_folder import USER_OS_ERRORS

        with explained(*USER_OS_ERRORS):
            from or1_megatron.evaluate.benchmarks import write_set

            for name in names:
                path, count = write_set(name, out, sets)
                print(f"{path}: {count} problems")

    return app


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
