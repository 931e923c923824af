"""Makes the summary of a run (``summary.json``) from the loop's result, and prints it as tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.report.console.format import fraction, number

if TYPE_CHECKING:
    from or1_megatron.rl.loop_arguments import LoopResult

_BRIEF_SHARE = 0.001
"""Verbs that take less than this share of the run's time share one line of the table, which gives their sum."""

_EVALUATED = (
    ("accuracy", "accuracy", "accuracy", fraction),
    ("accuracy, non-truncated", "non_truncated_accuracy", "non_truncated_accuracy", fraction),
    ("truncated", "truncation_ratio", "truncation_ratio", fraction),
    ("mean length, tokens", "mean_length", "mean_length_tokens", number),
)
"""Rows of the table: (title, name in the summary without _before or _after, EvaluationResult's attribute, format)."""


def summarise(
    result: LoopResult, *, total_steps: int, seed: int, model: Path | None, startup_s: float | None
) -> dict[str, Any]:
    """Return the summary of a run from the loop's result, with the fields of ``schemas.SUMMARY``.

    Args:
        model: the HF folder to which the model was exported; None without export.
        startup_s: seconds of this session before the first verb.
    """
    evaluation = result.after or result.before
    return {
        **{
            f"{name}_{when}": getattr(evaluated, attribute) if evaluated else None
            for when, evaluated in (("before", result.before), ("after", result.after))
            for _, name, attribute, _ in _EVALUATED
        },
        "evaluation_samples": evaluation.samples if evaluation else None,
        "steps": result.steps,
        "total_steps": total_steps,
        "finished": result.finished,
        "best_step": result.best_step,
        "skipped_updates": result.skipped_updates,
        "seed": seed,
        "wall_s": result.wall_s,
        "startup_s": startup_s,
        "time_s": dict(result.seconds),
        "other_share": result.other_s / result.wall_s if result.wall_s > 0 else None,
        "model": None if model is None else str(model),
    }


def show_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Print a run's summary: accuracy before and after training, time and share of each verb, the model's folder."""
    samples = summary["evaluation_samples"]
    held_out = "held-out" if samples is None else f"held-out, avg@{samples}"
    figures = [Column(heading, justify="right") for heading in ("before", "after")]
    outcome = Table(held_out, *figures, box=box.SIMPLE_HEAD, show_edge=False)
    for title, name, _, show in _EVALUATED:
        outcome.add_row(title, show(summary[f"{name}_before"]), show(summary[f"{name}_after"]))

    figures = [Column(heading, justify="right") for heading in ("seconds", "share")]
    times = Table("verb", *figures, box=box.SIMPLE_HEAD, show_edge=False)
    wall_s = summary["wall_s"]
    brief = {verb: seconds for verb, seconds in summary["time_s"].items() if seconds < _BRIEF_SHARE * wall_s}
    shown = {verb.replace("_", " "): seconds for verb, seconds in summary["time_s"].items() if verb not in brief}
    if brief:
        shown[f"{len(brief)} more"] = sum(brief.values())
    for verb, seconds in shown.items():
        times.add_row(verb, f"{seconds:.1f}", fraction(seconds / wall_s if wall_s else None))
    times.add_section()
    times.add_row("all", f"{wall_s:.1f}", "100.0%" if wall_s else "-")

    end = "" if summary["finished"] else ", stopped: the same command resumes it"
    console.print(
        f"\nstep {summary['steps']} of {summary['total_steps']}, seed {summary['seed']}{end}", highlight=False
    )
    console.print(outcome)
    console.print("\ntime")
    console.print(times)
    console.print()
    if summary["skipped_updates"]:
        console.print(f"SGD steps skipped, loss or gradient not finite: {summary['skipped_updates']}", style="yellow")
    other = "neither decoding nor forward, backward, optimizer"
    console.print(f"other:  {fraction(summary['other_share'])} of the time ({other})", highlight=False)
    console.print(f"model:  {summary['model'] or 'not exported'}", highlight=False, soft_wrap=True)
