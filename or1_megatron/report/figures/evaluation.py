"""Draws the figure of ``or1 eval``: accuracy by response length, and by context budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from or1_megatron.report.figures.style import as_svg, panels, styled


@styled
def draw_evaluation(results: Mapping[str, Any]) -> str:
    """Return the figure of an evaluation's results as SVG. If response lengths are unknown, the panels say so.

    Every bin of lengths holds about equally many responses, so the bars have equal widths. The axis shows bins' edges.
    """
    bins, budgets = results["outcome"]["by_length"], results["outcome"]["by_budget"]
    figure, (lengths, curve) = panels(2)
    for axes, what, known in ((lengths, "response length", bins), (curve, "context budget", budgets)):
        axes.set_title(f"accuracy by {what}, tokens")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter("{x:.0%}")
        if not known:
            axes.set_xticks([])
            axes.text(0.02, 0.05, "response lengths are not known", transform=axes.transAxes)
    if bins:
        edges = [item["low"] for item in bins] + [bins[-1]["high"] - 1]
        lengths.bar(range(len(bins)), [item["accuracy"] for item in bins], width=0.94, align="edge", color="#8fb4f2")
        lengths.set_xticks(range(len(edges)), [f"{edge:,}" for edge in edges], rotation=30)
    if budgets:
        curve.plot([f"{int(budget):,}" for budget in budgets], list(budgets.values()), "o-")
        curve.tick_params(axis="x", rotation=30)
    return as_svg(figure)
