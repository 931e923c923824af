"""Draws the figure of ``or1 doctor mismatch``: log-prob differences of engine and policy by token and by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from or1_megatron.report.figures.style import GREY, as_svg, panels, styled


@styled
def draw_mismatch(rows: Mapping[str, tuple[Any, Any, Any]]) -> str:
    """Return an SVG figure with a panel for each entry of ``rows``: (positions, differences, noise) of N tokens, [N].

    A dot is a token. Over 16 bins of positions, the blue line is the mean |difference|, the grey line the mean noise.
    """
    figure, axes = panels(len(rows))
    for panel, (name, (places, values, noise)) in zip(axes, rows.items(), strict=True):
        panel.set(title=name, yscale="log", xlabel="position", ylabel="|difference|, nats")
        panel.plot(places, np.abs(values) + 1e-9, ".", markersize=2, alpha=0.4)
        bins = places * 16 // (places.max() + 1)
        for amounts, colour in ((np.abs(values), "#1f5fbf"), (noise, GREY)):
            middle, means = zip(
                *((places[bins == b].mean(), amounts[bins == b].mean()) for b in np.unique(bins)), strict=True
            )
            panel.plot(middle, np.array(means) + 1e-9, color=colour)
    return as_svg(figure)
