"""Prints the results of ``or1 eval`` in the terminal: scores with intervals beside published ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_REPORTED: Final = "From the Skywork-OR1 report (temperature 1, top-p 1, 32,768 tokens)"


def show_evaluation(results: Mapping[str, Any], published: Mapping[str, float], console: Console) -> None:
    """Print an evaluation's scores with intervals, counts of statuses, and the ``published`` scores of other models."""
    outcome = results["outcome"]
    k = outcome["samples"]
    table = Table(
        "", "score", "95%, other samples", "95%, other problems", title=f"{results['data']}: {results['model']}",
        title_justify="left", box=None,
    )  # fmt: skip
    table.add_row(f"avg@{k}", *_cells(outcome["average"]), style="bold")
    for size, score in outcome["passed"].items():
        table.add_row(f"pass@{size}", *_cells(score))
    console.print(table)
    mean = outcome["mean_tokens"]
    length = "response lengths unknown" if mean is None else f"mean response {mean:,.1f} tokens"
    statuses = ", ".join(f"{status} {count:,}" for status, count in sorted(outcome["statuses"].items()))
    console.print(
        f"{outcome['problems']:,} problems x {k} samples; {length}; truncated {outcome['truncation_ratio']:.1%}; "
        + statuses,
        highlight=False,
    )
    if published:
        known = Table("reported", "", title=_REPORTED, title_justify="left", box=None)
        for model, score in sorted(published.items(), key=lambda item: item[1]):
            known.add_row(model, f"{score:.1f}%")
        known.add_row("this evaluation", f"{100 * outcome['average']['value']:.1f}%", style="bold")
        console.print(known)


def _cells(score: Mapping[str, Any]) -> tuple[str, str, str]:
    samples, problems = (
        f"{100 * score[kind]['low']:.1f} – {100 * score[kind]['high']:.1f}" for kind in ("samples", "problems")
    )
    return f"{100 * score['value']:.1f}%", samples, problems
