"""The ``or1`` command."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from or1_megatron.commands.ablate import ablate
from or1_megatron.commands.data import data_commands
from or1_megatron.commands.eval import eval_command
from or1_megatron.commands.report import report_command
from or1_megatron.errors import UserError

if TYPE_CHECKING:
    import torch

    from or1_megatron.sizing.run_plan import Device

app = typer.Typer(
    name="or1",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train long chain-of-thought models with the MAGIC recipe.",
)

USER_ERROR = 2
"""Exit code for what the user can mend: a config, a file, a folder that is in use."""


@contextmanager
def explained(*also: type[Exception]) -> Iterator[None]:
    """Print a UserError, or one of ``also``, as one message on stderr and exit with USER_ERROR.

    Any other error keeps its traceback.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (UserError, *also)):
            raise
        print(f"or1: error: {error}", file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None


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


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set stages.0.steps=3. Repeatable."),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train stage N alone (the first is 1), in a run folder of its own, from where stage N-1 ended.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what the config comes to and stop.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="--dry-run, and all that a start is refused for: weights, data, previous stage."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda: what --dry-run plans for, if not for this machine.")
    ] = None,
    shape: Annotated[
        Path | None,
        typer.Option(help="--dry-run for the model of this folder's config.json; neither weights nor data are needed."),
    ] = None,
) -> None:
    """Train as CONFIG says. A run folder that holds checkpoints is gone on with.

    SIGTERM, SIGUSR1 and Ctrl-C save and stop; a second one stops at once.
    """
    from or1_megatron.runtime.run_folder import USER_OS_ERRORS

    with explained(*USER_OS_ERRORS):
        from or1_megatron.config.load import load_config
        from or1_megatron.sizing.dry_run import plan_run, plan_shape, print_plan
        from or1_megatron.trainer.preflight import check_inputs, lacking

        overrides = [*(overrides or ()), *([] if stage is None else [f"run.stage={stage}"])]
        loaded = load_config(config, overrides)
        if shape is not None:
            if not dry_run:
                raise typer.BadParameter("only --dry-run works without weights and data", param_hint="--shape")
            print_plan(plan_shape(loaded, shape, _device(device)), Console())
            return
        planned = plan_run(loaded, _device(device))
        if dry_run or check:
            print_plan(planned, Console())
            if check:
                check_inputs(loaded)
                return
            for line in lacking(loaded):
                print(f"or1: not there yet: {line}", file=sys.stderr)
            return
        from or1_megatron.runtime.launch import launch_training

        for warning in planned.warnings:
            print(f"or1: warning: {warning}", file=sys.stderr)
        check_inputs(loaded)
        code = launch_training(config, overrides, loaded.parallel, loaded.checkpoint)
    raise typer.Exit(code)


def _device(named: str | None) -> Device:
    if named is None:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    if named == "cpu":
        return "cpu"
    if named == "cuda":
        return "cuda"
    raise typer.BadParameter(f"'{named}' is neither cpu nor cuda", param_hint="--device")


@app.command()
def check_parity(
    model: Annotated[Path, typer.Argument(help="An HF folder.")],
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="E.g. 'TP2 PP2 SP', repeatable; without any: all kinds of parallelism. Words: TPn PPn VPPn CPn DPn SP "
            "distopt full selective one_pass overlap overlap_gather layers=3+1 rowsN shuffled; 1 for none.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of the probe.")] = 24,
    longest: Annotated[int, typer.Option(min=4, help="Tokens of its longest sequence, at most.")] = 48,
    seed: Annotated[int, typer.Option(help="Of the probe.")] = 1,
    tolerance: Annotated[float, typer.Option(help="Multiplies the bounds, for a model deep enough to need it.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write the differences as JSON too.")] = None,
) -> None:
    """Compare layouts of MODEL with transformers + torch: log-probs, entropies, loss, gradients, three optimizer steps.

    Exits with 1 and names what differs when a layout computes something else.
    """
    with explained():
        from or1_megatron.commands.check_parity import check_parity as check
        from or1_megatron.config.schema import ModelConfig

        if dtype not in ("float32", "bfloat16"):
            raise typer.BadParameter(f"'{dtype}' is neither float32 nor bfloat16", param_hint="--dtype")
        settings = ModelConfig.model_validate({"hf": model, "dtype": dtype})
        code = check(
            settings,
            layouts or (),
            Console(),
            sequences=sequences,
            longest=longest,
            seed=seed,
            tolerance=tolerance,
            out=out,
        )
    raise typer.Exit(code)


@app.command()
def replay(
    dump: Annotated[Path, typer.Argument(help="A folder in a run's dumps/.")],
    layout: Annotated[
        str, typer.Option(metavar="LAYOUT", help="E.g. 'TP2 PP2'; 1: one process; run: as in the run that dumped it.")
    ] = "1",
    model: Annotated[Path | None, typer.Option(help="HF folder of the weights, if not those in the dump.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Of loss and gradient norm, relative; by default what the dtype needs.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write what came out as JSON too.")] = None,
) -> None:
    """Make a dumped SGD step again, at any layout: loss, gradient norm, and where log-probs are not finite.

    Exits with 1, saying what differs, when it does not come out as in the run.
    """
    with explained():
        from or1_megatron.commands.replay import replay as make_again

        code = make_again(dump, layout, model, tolerance, Console(), out)
    raise typer.Exit(code)


@app.command()
def plan_handoff(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set parallel.tensor=4. Repeatable."),
    ] = None,
    gigabits: Annotated[float, typer.Option(help="Speed of each rank's link, per direction, in Gb/s.")] = 400.0,
) -> None:
    """Print who would send which bytes of the weights to whom with handoff.backend: shard. Starts nothing."""
    from or1_megatron.runtime.run_folder import USER_OS_ERRORS

    with explained(*USER_OS_ERRORS):
        from or1_megatron.commands.plan_handoff import forecast_of, print_forecast
        from or1_megatron.config.load import load_config

        print_forecast(forecast_of(load_config(config, overrides or ())), gigabits, Console())


@app.command()
def config(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set stages.0.steps=3. Repeatable."),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Print the value of this key alone, e.g. parallel.ranks.")] = None,
) -> None:
    """Print the whole configuration, overlays, overrides and defaults included."""
    from or1_megatron.runtime.run_folder import USER_OS_ERRORS

    with explained(*USER_OS_ERRORS):
        from or1_megatron.config.load import load_config, resolved_yaml, value_of

        loaded = load_config(config, overrides or ())
        print(resolved_yaml(loaded).rstrip() if key is None else value_of(loaded, key))


@app.command()
def doctor() -> None:
    """Say what this machine has and lacks, and what follows from it."""
    from or1_megatron.commands.doctor import CHECKS, print_findings, stops_training

    findings = print_findings(CHECKS, Console())
    raise typer.Exit(1 if stops_training(findings) else 0)


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Which step's; the newest if not given.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many responses to show.")] = 8,
    status: Annotated[str | None, typer.Option(help="Only those with this verdict, e.g. wrong or truncated.")] = None,
) -> None:
    """Show sampled responses with their verdicts and advantages."""
    with explained(FileNotFoundError, ValueError):
        from or1_megatron.report.console.rollouts import show_rollouts

        show_rollouts(run, step=step, limit=limit, status=status, console=Console())


@app.command()
def picture(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Argument(help="The picture to write, an .svg file.")],
) -> None:
    """Draw a run: accuracy, entropy against its target, length and truncation over the steps."""
    with explained(FileNotFoundError, ValueError):
        from or1_megatron.report.figures.run import draw_run

        draw_run(run, out)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="Rows of problems (.jsonl, .parquet), each with a 'response'.")],
    out: Annotated[Path, typer.Option(help="The same rows with reward, status and detail; gone on with, if begun.")],
    config: Annotated[Path | None, typer.Option(help="A run's YAML file, for its verify section.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Rows judged at once.")] = 1,
    explain: Annotated[bool, typer.Option("--explain", help="Print why, row by row.")] = False,
) -> None:
    """Score recorded responses: ground truths as in training, 'truncated' optional. Prints a table by source."""
    with explained(PermissionError, NotADirectoryError, IsADirectoryError):
        from or1_megatron.commands.verify import verify_file
        from or1_megatron.config.load import load_config
        from or1_megatron.config.schema import VerifyConfig

        settings = VerifyConfig() if config is None else load_config(config).verify
        verify_file(file, out, settings, workers, explain, Console())


app.add_typer(data_commands(explained), name="data")

convert = typer.Typer(no_args_is_help=True, help="Convert between HF folders and Megatron checkpoints, on the CPU.")
app.add_typer(convert, name="convert")

_VERIFY = typer.Option("--verify", help="Read every tensor again from the disk and compare it.")


@convert.command()
def hf_to_megatron(
    hf: Annotated[Path, typer.Option(help="An HF folder: config.json, safetensors.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to make; must not exist.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...; as the source, if not given.")] = None,
    verify: Annotated[bool, _VERIFY] = False,
) -> None:
    """Make a Megatron checkpoint, loadable at any layout, of an HF folder. Killed, the same command goes on."""
    with explained(*_CONVERT_OS_ERRORS):
        from or1_megatron.convert.to_megatron import hf_to_megatron as run

        run(hf, out, Console(stderr=True), dtype=_dtype(dtype), verify=verify)


@convert.command()
def megatron_to_hf(
    megatron: Annotated[
        Path, typer.Option(help="A converted checkpoint, a run's step_N, or Megatron-LM's torch_dist.")
    ],
    out: Annotated[Path, typer.Option(help="The HF folder to make; must not exist.")],
    hf: Annotated[
        Path | None, typer.Option(help="Where config and tokenizer come from, if the checkpoint does not say.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...; as the source, if not given.")] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Of a file, e.g. 5GB or 500MB; divided as the source was, if not given.")
    ] = None,
    verify: Annotated[bool, _VERIFY] = False,
) -> None:
    """Make an HF folder, as transformers loads it, of a Megatron checkpoint. Killed, the same command goes on."""
    with explained(*_CONVERT_OS_ERRORS):
        from or1_megatron.convert.to_hf import megatron_to_hf as run

        shard_bytes = None if max_shard_size is None else _bytes(max_shard_size)
        run(megatron, out, Console(stderr=True), hf=hf, dtype=_dtype(dtype), shard_bytes=shard_bytes, verify=verify)


_CONVERT_OS_ERRORS = (NotADirectoryError, PermissionError)


def _dtype(name: str | None) -> torch.dtype | None:
    from or1_megatron.convert.hf_folder import DTYPES

    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name is not None and name not in known:
        raise typer.BadParameter(f"'{name}' is none of {', '.join(known)}", param_hint="--dtype")
    return known[name] if name is not None else None


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", text.strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(
            f"'{text}' is no size; expected e.g. 5GB, 500MB or 4GiB", param_hint="--max-shard-size"
        )
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


app.command()(ablate)
app.command(name="eval")(eval_command(explained))
app.command(name="report")(report_command(explained))


if __name__ == "__main__":
    app()
