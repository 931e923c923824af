"""A picture of one step: who is busy when. For a terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from rich.text import Text

from or1_megatron.plan.rollout_time import Span
from or1_megatron.plan.step_time import StepTime
from or1_megatron.report.figures.svg import document, text

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


def svg(step: StepTime, title: str) -> str:
    """Return the picture as SVG, with up to 32 engines."""
    total, left, width, height = step.seconds, 150, 760, 14
    lines = timeline(step, 32)
    bottom = 44 + len(lines) * height
    shapes = [text(left, 18, f"{title}: one step of {total:,.0f} s")]
    for tick in np.linspace(0, total, 5):
        x = left + tick / total * width
        shapes.append(f'<line x1="{x:.1f}" y1="30" x2="{x:.1f}" y2="{bottom}" stroke="#d5d9de"/>')
        shapes.append(text(x, bottom + 16, f"{tick:,.0f} s", anchor="middle"))
    for n, (name, spans, colour) in enumerate(lines):
        y = 36 + n * height
        shapes.append(text(left - 8, y + 10, name, anchor="end"))
        for begin, end in spans:
            shapes.append(
                f'<rect x="{left + begin / total * width:.1f}" y="{y}" width="{(end - begin) / total * width:.2f}" '
                f'height="{height - 3}" fill="{_COLOURS[colour]}"><title>{name}: {end - begin:,.1f} s</title></rect>'
            )
    return document(left + width + 30, bottom + 28, shapes)
