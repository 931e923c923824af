"""A picture of one step: who is busy when."""

from __future__ import annotations

from typing import Final

import numpy as np
from rich.text import Text

from or1_megatron.plan.step_time import StepTime

_WIDTH: Final = 58
_BUSY, _IDLE = "█", "·"
_TRAINER: Final = ("score", "update")


def picture(step: StepTime) -> Text:
    """Return a line for the engines' deciles, one for each verb, over the time of a step from left to right."""
    total = step.seconds
    lines = [Text(f"One step of {total:,.0f} s; each column is {total / _WIDTH:,.1f} s", style="bold")]
    ends = np.sort(step.rollout.engine_s)[::-1]
    chosen = np.unique(np.linspace(0, ends.size - 1, min(ends.size, 6)).astype(int))
    shown = min(total, step.rollout.decoded_s)
    for rank in chosen:
        name = f"engine {rank + 1} of {ends.size}"
        lines.append(_bar(name, [(0.0, min(float(ends[rank]), shown))], total, "green"))
    begun = 0.0
    for verb, spent in step.verbs.items():
        if verb != "roll_out":
            begun = max(begun, step.verbs.get("roll_out", 0.0))
            colour = "blue" if verb in _TRAINER else "yellow"
            lines.append(_bar(verb, [(begun, begun + spent)], total, colour))
            begun += spent
    return Text("\n").join(lines)


def _bar(name: str, spans: list[tuple[float, float]], total: float, colour: str) -> Text:
    cells = [_IDLE] * _WIDTH
    for begin, end in spans:
        first, last = round(begin / total * _WIDTH), round(end / total * _WIDTH)
        for cell in range(first, max(last, first + (end > begin))):
            cells[min(cell, _WIDTH - 1)] = _BUSY
    return Text(f"{name:>18} ") + Text("".join(cells), style=colour)
