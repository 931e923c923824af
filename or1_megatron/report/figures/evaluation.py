"""The figure of an evaluation: accuracy by response length, and by context budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from or1_megatron.report.figures.svg import Axes, document, dots, path, text, ticks

_WIDTH, _HEIGHT = 480, 300
_AXES = Axes(x=(0, 1), y=(0, 1), left=52, right=_WIDTH - 16, top=36, bottom=_HEIGHT - 44)
"""x: a share of the panel's width."""
_UPRIGHT_PX = 44
"""The width of a label such as 131,072."""
_COLOUR, _BAR = "#2f6fde", "#8fb4f2"


def draw_evaluation(results: Mapping[str, Any]) -> str:
    """Return the SVG. A panel says so if the response lengths are unknown."""
    outcome = results["outcome"]
    return document(
        2 * _WIDTH,
        _HEIGHT,
        [
            *_panel(0, "accuracy by response length, tokens", _bars(outcome["by_length"])),
            *_panel(_WIDTH, "accuracy by context budget, tokens", _curve(outcome["by_budget"])),
        ],
    )


def _panel(x: float, title: str, shapes: Sequence[str]) -> list[str]:
    unknown = [text(_AXES.left + 8, _AXES.bottom - 12, "response lengths are not known")]
    frame = _AXES.frame(title, ticks(1.0), "{:.0%}".format)
    return [f'<g transform="translate({x:g} 0)">', *frame, *(shapes or unknown), "</g>"]


def _bars(bins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return bars of the same width, since the bins hold about as many responses each, with their edges below."""
    if not bins:
        return []
    width = (_AXES.right - _AXES.left) / len(bins)
    shapes = []
    for i, found in enumerate(bins):
        x, y = _AXES.at(i / len(bins), found["accuracy"])
        shapes.append(
            f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" height="{_AXES.bottom - y:.1f}" fill="{_BAR}">'
            f"<title>{found['low']} to {found['high'] - 1} tokens: {found['accuracy']:.1%} of {found['responses']}"
            "</title></rect>"
        )
        shapes.append(_below(x, f"{found['low']:,}", width))
    return [*shapes, _below(_AXES.right, f"{bins[-1]['high'] - 1:,}", width)]


def _curve(budgets: Mapping[str, float]) -> list[str]:
    if not budgets:
        return []
    gaps = max(1, len(budgets) - 1)
    points = [_AXES.at(i / gaps, share) for i, share in enumerate(budgets.values())]
    room = (_AXES.right - _AXES.left) / gaps
    labels = [_below(x, f"{int(budget):,}", room) for (x, _), budget in zip(points, budgets, strict=True)]
    return [path(points, _COLOUR, 2), *dots(points, _COLOUR), *labels]


def _below(x: float, label: str, room: float) -> str:
    """Return a label below the axis: upright if there are ``room`` pixels to the next one, else slanting."""
    y = _AXES.bottom + 16
    if room >= _UPRIGHT_PX:
        return text(min(x, _WIDTH - _UPRIGHT_PX / 2), y, label, anchor="middle", more=' font-size="11"')
    return text(x, y, label, anchor="end", more=f' font-size="10" transform="rotate(-30 {x:.1f} {y:.1f})"')
