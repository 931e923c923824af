"""SVG text: a document, the axes of a panel, and the few shapes that figures consist of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, GREY, GRID = "#1f2933", "#6b7785", "#e4e8ec"

Points = Sequence[tuple[float, float]]


def document(width: float, height: float, body: Sequence[str]) -> str:
    """Return an SVG document with these elements on white."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a panel, whose plot lies between ``left`` and ``right``, ``top`` and ``bottom`` (px)."""

    x: tuple[float, float]
    """The values at ``left`` and ``right``."""
    y: tuple[float, float]
    """The values at ``bottom`` and ``top``."""
    left: float
    right: float
    top: float
    bottom: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point is drawn."""
        (left, right), (low, high) = self.x, self.y
        return (
            self.left + (x - left) / (right - left) * (self.right - self.left),
            self.bottom - (y - low) / (high - low) * (self.bottom - self.top),
        )

    def frame(self, title: str, levels: Sequence[float], label: Callable[[float], str] = "{:g}".format) -> list[str]:
        """Return the title, and a grid line with its label at each level of y."""
        shapes = [f'<text x="{self.left:g}" y="18" font-size="13" font-weight="600">{escape(title)}</text>']
        for level in levels:
            y = self.at(self.x[0], level)[1]
            shapes.append(line((self.left, y), (self.right, y), GRID))
            shapes.append(text(self.left - 6, y + 4, label(level), anchor="end"))
        return shapes

    def steps(self) -> list[str]:
        """Return the labels of the whole numbers along x."""
        low, high = self.x
        marked = [step for step in ticks(high) if low <= step <= high and step == int(step)]
        return [text(self.at(step, self.y[0])[0], self.bottom + 17, f"{step:g}", anchor="middle") for step in marked]


def text(x: float, y: float, content: str, *, anchor: str = "start", more: str = "") -> str:
    """Return a grey text; ``more``: further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{GREY}"{more}>{escape(content)}</text>'


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, anchor: str) -> str:
    """Return labels [(text, colour)] side by side, each in its colour."""
    spans = [
        f'<tspan fill="{colour}" dx="{12 if i else 0}">{escape(label)}</tspan>'
        for i, (label, colour) in enumerate(entries)
    ]
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="11" font-weight="600">{"".join(spans)}</text>'


def line(start: tuple[float, float], end: tuple[float, float], colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}"{dashed}/>'
    )


def path(points: Points, colour: str, width: float, opacity: float = 1.0) -> str:
    return (
        f'<polyline points="{_corners(points)}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}" stroke-linejoin="round"/>'
    )


def dots(points: Points, colour: str) -> list[str]:
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]


def band(edge: Points, other: Points, colour: str) -> str:
    """Return the area between two curves."""
    return f'<polygon points="{_corners([*edge, *reversed(other)])}" fill="{colour}" fill-opacity="0.12"/>'


def _corners(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def ticks(top: float) -> list[float]:
    """Return four to eight round numbers from 0 to ``top`` or above: steps of 1, 2, 2.5 or 5 times a power of 10."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(size * power for size in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if top / (size * power) <= 5 + 1e-9)
    return [round(step * i, 10) for i in range(math.ceil(top / step - 1e-9) + 1)]
