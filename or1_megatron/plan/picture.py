"""A picture of one step: who is busy when. For a terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.text import Text

from or1_megatron.plan.rollout_time import Span
from or1_megatron.plan.step_time import StepTime
from or1_megatron.report.figures.style import as_svg, panels, styled

_WIDTH: Final = 58
_BUSY, _IDLE = "█", "·"
_TRAINER: Final = ("score", "update")
_COLOURS: Final = {"green": "#3a9d5d", "blue": "#2f6fde", "yellow": "#e39a2d"}

Line = tuple[str, Sequence[Span], str]
"""(name, when it is busy, colour)."""


def timeline(step: StepTime, engines: int) -> list[Line]:
    """Return up to ``engines`` engines, from the busiest to the least busy, and the loop's verbs after the rollout.

    Seconds since the step's begin.
    """
    ordered = [step.rollout.spans[n] for n in np.argsort(-step.rollout.busy_s, kind="stable")]
    shown = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), engines)).astype(int))
    lines: list[Line] = [(f"engine {rank + 1} of {len(ordered)}", ordered[rank], "green") for rank in shown]
    begun = step.verbs.get("roll_out", 0.0)
    for verb, spent in step.verbs.items():
        if verb != "roll_out":
            lines.append((verb, [(begun, begun + spent)], "blue" if verb in _TRAINER else "yellow"))
            begun += spent
    return lines


def picture(step: StepTime) -> Text:
    """Return the picture for a terminal; time runs from left to right."""
    total = step.seconds
    heading = Text(f"One step of {total:,.0f} s; each column is {total / _WIDTH:,.1f} s", style="bold")
    return Text("\n").join([heading, *(_bar(*line, total) for line in timeline(step, 6))])


def _bar(name: str, spans: Sequence[Span], colour: str, total: float) -> Text:
    cells = [_IDLE] * _WIDTH
    for begin, end in spans:
        first, last = round(begin / total * _WIDTH), round(end / total * _WIDTH)
        for cell in range(first, max(last, first + (end > begin))):
            cells[min(cell, _WIDTH - 1)] = _BUSY
    return Text(f"{name:>18} ") + Text("".join(cells), style=colour)


@styled
def svg(step: StepTime, title: str) -> str:
    """Return the picture as SVG, with up to 32 engines."""
    lines = timeline(step, 32)
    figure, (axes,) = panels(1, width=9.4, height=0.8 + 0.16 * len(lines))
    axes.set_title(f"{title}: one step of {step.seconds:,.0f} s")
    for row, (_, spans, colour) in enumerate(lines):
        axes.broken_barh([(begin, end - begin) for begin, end in spans], (row - 0.4, 0.8), color=_COLOURS[colour])
    axes.set_yticks(range(len(lines)), [name for name, _, _ in lines])
    axes.invert_yaxis()
    axes.set_xlim(0, step.seconds)
    axes.xaxis.set_major_formatter("{x:,g} s")
    return as_svg(figure)
