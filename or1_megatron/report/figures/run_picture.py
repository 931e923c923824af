"""The figure of a run, as SVG: accuracy, entropy against its target, length and truncation over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from or1_megatron.report.figures.style import GREY, as_svg, panels, styled
from or1_megatron.report.recorded_config import entropy_target, read_config
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder

_SMOOTHED_STEPS: Final = 9
"""A smoothed value is the mean over so many steps around it, fewer near the ends of a stage."""


@dataclass(frozen=True)
class Curve:
    """A metric as a line. With ``points``, for one that few steps measure, the values are marked and not smoothed."""

    metric: str
    label: str
    colour: str
    points: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    curves: tuple[Curve, ...]
    per_cent: bool = False
    top: float = 0.0
    """The axis goes up to this or more."""


_ACCURACY: Final = (
    Curve("accuracy/all", "training", "#2f6fde"),
    Curve("accuracy/non_truncated", "training, non-truncated", "#8fb4f2"),
    Curve("evaluation/accuracy", "held-out", "#d9480f", points=True),
)
_LENGTH: Final = (Curve("length/mean", "mean", "#7048c6"), Curve("length/p95", "p95", "#b9a3e3"))
_PANELS: Final = (
    Panel("accuracy", _ACCURACY, per_cent=True, top=1.0),
    Panel("entropy, nats per token", (Curve("entropy/sampled", "e_k", "#0b8a6f"),)),
    Panel("response length, tokens", _LENGTH),
    Panel("truncated responses", (Curve("truncation/ratio", "training", "#c2255c"),), per_cent=True, top=0.1),
)


def draw_run(run: Path, out: Path) -> None:
    """Draw the metrics of ``run`` to ``out``.

    Raises FileNotFoundError if the run has no metrics, ValueError if it has no finished step or ``out`` is not *.svg.
    """
    if out.suffix != ".svg":
        raise ValueError(f"{out}: the picture is an SVG; a name that ends in .svg was expected")
    folder = RunFolder(run)
    if not folder.metrics.is_file():
        raise FileNotFoundError(f"no metrics to draw: {folder.metrics} does not exist")
    rows = list(read_steps(folder.metrics).values())
    if not any("reward/mean" in row for row in rows):
        raise ValueError(f"{folder.metrics}: no finished step to draw yet")
    write_atomically(out, picture(rows, entropy_target(read_config(folder))).encode(), "the run's picture")


@styled
def picture(rows: Sequence[Mapping[str, Any]], entropy_target: float | None) -> str:
    """Return the SVG of these rows, one per step, in order."""
    metrics = pd.DataFrame(rows).set_index("step")
    begins = _stage_begins(metrics)
    stages = pd.Series(np.searchsorted(list(begins), metrics.index, side="right"), metrics.index)
    figure, axes = panels(len(_PANELS))
    if entropy_target is not None:
        axes[1].axhline(entropy_target, color="black", linewidth=1, linestyle="--", label=f"target {entropy_target:g}")
    for axis, panel in zip(axes, _PANELS, strict=True):
        axis.set_title(panel.title)
        if panel.per_cent:
            axis.yaxis.set_major_formatter(PercentFormatter(1))
        for curve in panel.curves:
            if curve.metric in metrics:
                _draw(axis, curve, metrics[curve.metric].astype(float).dropna(), stages)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
        axis.set_ylim(0, max(panel.top, axis.get_ylim()[1]))
        for step, label in begins.items():
            axis.axvline(step - 0.5, color=GREY, linewidth=1, linestyle=":")
            axis.text(step - 0.5, 0.02, f" {label}", color=GREY, transform=axis.get_xaxis_transform())
    return as_svg(figure)


def _stage_begins(metrics: pd.DataFrame) -> dict[int, str]:
    """Return the first step of each stage after the first, and a label with its T."""
    if "stage/index" not in metrics:
        return {}
    staged = metrics.dropna(subset="stage/index")
    begun = staged[staged["stage/index"].diff() > 0]
    return {int(step): f"T {limit:g}" for step, limit in begun["stage/max_response_tokens"].items()}


def _draw(axis: Axes, curve: Curve, values: pd.Series, stages: pd.Series) -> None:
    """Draw the values where the metric was measured and finite; but for points, they are smoothed stage by stage."""
    if values.empty:
        return
    if curve.points:
        axis.plot(values.index, values, "o-", color=curve.colour, label=curve.label, markersize=4)
        return
    axis.plot(values.index, values, color=curve.colour, linewidth=1, alpha=0.3)
    smooth = values.groupby(stages).transform(lambda part: part.rolling(_SMOOTHED_STEPS, 1, center=True).mean())
    axis.plot(smooth.index, smooth, color=curve.colour, label=curve.label)
