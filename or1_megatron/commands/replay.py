"""`or1 replay`: repeats a dumped update, at any layout, and compares it with what the run saw.

This process starts the ranks (``parallel.replay``), and compares and shows what rank 0 noted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.commands.errors import explained
from or1_megatron.runtime.driver import check_driver

if TYPE_CHECKING:
    from or1_megatron.config.schema import ModelConfig, ParallelConfig
    from or1_megatron.rl.dump import UpdateDump
    from or1_megatron.types import UpdateReport

TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest difference of loss and gradient norm between layouts, relative to the value (a loss below 1: to 1)."""
AS_IN_THE_RUN: Final = "run"
"""Names the layout of the run that wrote the dump."""
_SHOWN_SAMPLES: Final = 20


def replay(
    dump: Annotated[Path, typer.Argument(help="A folder in a run's dumps/.")],
    layout: Annotated[
        str, typer.Option(metavar="LAYOUT", help="E.g. 'TP2 PP2'; 1: one process; run: as in the run that dumped it.")
    ] = "1",
    model: Annotated[Path | None, typer.Option(help="HF folder of the weights, if not those in the dump.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative, of loss and gradient norm; by default what the dtype needs.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON too.")] = None,
) -> None:
    """Repeat a dumped SGD step at any layout: loss, gradient norm, and where log-probs are not finite.

    Exits with 1, and says what differs, when the results are not those of the run.
    """
    with explained():
        check_driver()
        code = repeat_update(dump, layout, model, tolerance, Console(), out)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Replayed:
    """The result of the repeated update."""

    report: UpdateReport
    first_not_finite: Mapping[int, int]
    """Sample to the first of its counted tokens whose log-prob is not finite."""
    log_prob_difference: float
    """Largest difference of a log-prob from the dump's, over tokens that are finite in both; nats."""


def repeat_update(
    folder: Path, layout: str, model: Path | None, tolerance: float | None, console: Console, out: Path | None = None
) -> int:
    """Repeat the update and show it beside the dump's; return the exit status: 0 if it is the same, 1 if not.

    Args:
        layout: words of ``parallel_layouts.HELP``, or ``run``.
        model: HF folder of the weights; None: those in the dump.
        tolerance: None: ``TOLERANCE`` of the model's dtype.
        out: where to write the result as JSON.

    Raises:
        DumpError, LayoutError, ModelError: before any rank starts.
    """
    from or1_megatron.rl.dump import read_dump, report_of
    from or1_megatron.selftest.process import run_function
    from or1_megatron.sizing.conflicts import layout_conflicts
    from or1_megatron.sizing.parallel_layouts import LayoutError
    from or1_megatron.weights.families import read_hf_config
    from or1_megatron.weights.files import check_weight_files
    from or1_megatron.weights.shape import Shape

    dump = read_dump(folder)
    settings = model_of(dump, folder, model)
    parallel = layout_of(dump, layout)
    hf = read_hf_config(settings.hf)
    check_weight_files(settings.hf, hf)
    if conflicts := list(layout_conflicts(parallel, Shape.of(hf))):
        raise LayoutError(f"layout '{layout}' cannot work: {'; '.join(conflicts)}")
    task = {"dump": str(folder), "weights": str(settings.hf), "parallel": parallel.model_dump(mode="json")}
    status, noted = run_function("or1_megatron.parallel.replay:replay", task, parallel.ranks, "the replay")
    if status or noted is None:
        return status or 1
    if out is not None:
        out.write_text(json.dumps(noted))
    bad = {int(sample): token for sample, token in noted["first_not_finite"].items()}
    replayed = Replayed(report_of(noted, dump.token_count), bad, noted["log_prob_difference"])
    show(dump, replayed, layout, console)
    limit = TOLERANCE[settings.dtype] if tolerance is None else tolerance
    differences = list(differ(dump.report, replayed.report, limit))
    if dump.raised:
        differences = [f"not reproduced: in the run the update raised {dump.raised!r}, now it went through"]
    for line in differences:
        console.print(line, style="red", soft_wrap=True)
    if not differences:
        same = "again not finite" if dump.report.skipped else f"the same within {limit:g}"
        console.print(f"reproduced: {same}", style="green")
    return int(bool(differences))


def model_of(dump: UpdateDump, folder: Path, model: Path | None) -> ModelConfig:
    """Return weights and dtype. Raises DumpError if there are no weights."""
    from or1_megatron.config.schema import ModelConfig
    from or1_megatron.rl.dump import WEIGHTS, DumpError

    weights = model or folder / WEIGHTS
    if model is None and not weights.is_dir():
        raise DumpError(
            f"{folder} holds no weights (safety.dump_weights was off, or the update raised): give --model, the HF "
            f"folder of the policy as it was after step {dump.step - 1}"
        )
    return ModelConfig(hf=weights, dtype=dump.context["model"]["dtype"])


def layout_of(dump: UpdateDump, layout: str) -> ParallelConfig:
    """Return the run's own layout, or the named one with rows that hold four of the longest sequence.

    Raises:
        LayoutError: the name cannot be read.
    """
    from or1_megatron.config.schema import ParallelConfig
    from or1_megatron.sizing.parallel_layouts import parse_layout

    if layout == AS_IN_THE_RUN:
        return ParallelConfig.model_validate(dump.context["parallel"])
    longest = max(sample.prompt_ids.size + sample.response_ids.size for sample in dump.samples)
    return parse_layout(layout, longest).parallel


def differ(before: UpdateReport, now: UpdateReport, tolerance: float) -> Iterator[str]:
    """Yield a sentence for each difference."""
    if before.skipped != now.skipped:
        words = {True: "was skipped for want of a finite loss or gradient", False: "was finite"}
        yield f"not reproduced: in the run it {words[before.skipped]}, now it {words[now.skipped]}"
    for name, old, new, least in (
        ("loss", _loss(before), _loss(now), 1.0),
        ("gradient norm", before.grad_norm, now.grad_norm, 0.0),
    ):
        if math.isfinite(old) and not abs(new - old) <= tolerance * max(abs(old), least):
            yield f"not reproduced: {name} was {old:.8g}, is {new:.8g}; expected within {tolerance:g}"


def show(dump: UpdateDump, now: Replayed, layout: str, console: Console) -> None:
    """Print both side by side, and the samples with log-probs that are not finite."""
    from or1_megatron.rl.dump import first_not_finite

    tokens = dump.token_count
    title = f"Step {dump.step}, SGD step {dump.update}: {len(dump.samples)} samples, {tokens} tokens"
    headings = ("in the run", f"now ({layout})", "difference")
    columns = [Column("", no_wrap=True), *(Column(heading, justify="right", no_wrap=True) for heading in headings)]
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    rows = [
        ("loss", _loss(dump.report), _loss(now.report)),
        ("gradient norm", dump.report.grad_norm, now.report.grad_norm),
        *((f"sum of {name}", value, now.report.sums.get(name, math.nan)) for name, value in dump.report.sums.items()),
    ]
    for name, old, new in rows:
        table.add_row(name.replace("sum of max_", "largest "), f"{old:.8g}", f"{new:.8g}", f"{new - old:.2g}")
    table.add_row("log-probs", "", "", f"{now.log_prob_difference:.2g}")
    console.print(table)
    before = first_not_finite(dump.log_probs)
    bad = sorted(before.keys() | now.first_not_finite.keys())
    console.print(f"samples with a log-prob that is not finite: {len(bad)}", highlight=False)
    for sample in bad[:_SHOWN_SAMPLES]:
        where = [
            f"from counted token {first[sample]}" if sample in first else "none"
            for first in (before, now.first_not_finite)
        ]
        console.print(f"  sample {sample}: in the run {where[0]}, now {where[1]}", highlight=False)
    if len(bad) > _SHOWN_SAMPLES:
        console.print(f"  and {len(bad) - _SHOWN_SAMPLES} more", highlight=False)


def _loss(report: UpdateReport) -> float:
    """Return the loss per token."""
    return report.sums["loss"] / report.token_count
