"""Prints the results of ``or1 eval`` in the terminal: scores with intervals, and counts of verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def show_evaluation(results: Mapping[str, Any], console: Console) -> None:
    """Print the scores of an evaluation with their intervals, and the number of verdicts of each status."""
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


def _cells(score: Mapping[str, Any]) -> tuple[str, str, str]:
    samples, problems = (
        f"{100 * score[kind]['low']:.1f} – {100 * score[kind]['high']:.1f}" for kind in ("samples", "problems")
    )
    return f"{100 * score['value']:.1f}%", samples, problems
