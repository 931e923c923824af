"""The few shapes that the pictures are drawn with, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, GREY, GRID = "#1f2933", "#6b7785", "#e4e8ec"

Points = Sequence[tuple[float, float]]


def legend(entries: Sequence[tuple[str, str]], right: float) -> list[str]:
    """Labels in their curve's colour, right-aligned above the panel."""
    spans = [
        f'<tspan fill="{colour}" dx="{12 if i else 0}">{escape(text)}</tspan>'
        for i, (text, colour) in enumerate(entries)
    ]
    return [f'<text x="{right:g}" y="34" text-anchor="end" font-size="11" font-weight="600">{"".join(spans)}</text>']


def line(start: tuple[float, float], end: tuple[float, float], colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}"{dashed}/>'
    )


def path(points: Points, colour: str, width: float, opacity: float = 1.0) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}" stroke-linejoin="round"/>'
    )


def ticks(top: float) -> list[float]:
    """Four to eight round numbers from 0 that reach ``top``: steps of 1, 2, 2.5 or 5 times a power of ten."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(size * power for size in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if top / (size * power) <= 5 + 1e-9)
    return [round(step * i, 10) for i in range(math.ceil(top / step - 1e-9) + 1)]


def band(edge: Points, other: Points, colour: str) -> str:
    """The area between two curves."""
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*edge, *reversed(other)])
    return f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.12"/>'
