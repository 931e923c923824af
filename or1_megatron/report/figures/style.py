"""The style of figures, and helpers to draw them with matplotlib so that equal data give equal bytes."""

from __future__ import annotations

import io
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GREY: Final = "#6b7785"

styled = matplotlib.rc_context(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "or1_megatron",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "axes.edgecolor": GREY,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "grid.color": "#e4e8ec",
        "legend.frameon": False,
        "legend.fontsize": 8,
        "xtick.color": GREY,
        "ytick.color": GREY,
    }
)
"""Decorator for functions that draw a figure: inside the function matplotlib uses the style of our figures."""


def panels(count: int, width: float = 5.0, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Return a figure and its ``count`` panels, two in a row. Each panel is ``width`` by ``height`` inches."""
    columns, rows = min(count, 2), -(-count // 2)
    figure = Figure((columns * width, rows * height), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def as_svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG element. The same text in a file is an SVG document."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    return text[text.index("<svg") :]
