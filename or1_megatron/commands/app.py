"""The ``or1`` command and its subcommands.

Importing this module does not import torch, so that ``or1 --help`` answers at once. A subcommand imports the modules
that it needs when it is called.
"""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from or1_megatron.commands.check_parity import check_parity
from or1_megatron.commands.config import config
from or1_megatron.commands.convert import convert
from or1_megatron.commands.data import data
from or1_megatron.commands.doctor import doctor
from or1_megatron.commands.eval import evaluate
from or1_megatron.commands.plan import plan
from or1_megatron.commands.recipes import recipes
from or1_megatron.commands.report import report
from or1_megatron.commands.selftest import selftest
from or1_megatron.commands.timeline import timeline
from or1_megatron.commands.train import train
from or1_megatron.commands.watch import watch
from or1_verify.command import main as or1_verify_main

app = typer.Typer(
    name="or1",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train long chain-of-thought models with the MAGIC recipe.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"or1-megatron {importlib.metadata.version('or1-megatron')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (train, recipes, config, check_parity, plan, selftest, report, timeline, watch):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(convert, name="convert")
app.add_typer(doctor, name="doctor")
app.command(name="eval")(evaluate)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def verify(context: typer.Context) -> None:
    """Score a file of recorded responses: the command or1-verify."""
    try:
        raise typer.Exit(or1_verify_main(context.args))
    except SystemExit as ended:  # of its --help, or of a wrong option
        raise typer.Exit(int(ended.code or 0)) from None


if __name__ == "__main__":
    app()
