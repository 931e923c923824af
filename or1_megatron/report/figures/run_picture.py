"""The figure of a run, as SVG: accuracy, entropy against its target, length and truncation over the steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from or1_megatron.report.figures.style import GREY, as_svg, panels, styled
from or1_megatron.report.recorded_config import entropy_target, read_config
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder

_SMOOTHED_STEPS: Final = 9


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
    stages = [row for row in rows if "stage/index" in row]
    boundaries = {
        int(row["step"]) - 0.5: f"T {row['stage/max_response_tokens']:g}"
        for earlier, row in pairwise(stages)
        if row["stage/index"] != earlier["stage/index"]
    }
    figure, axes = panels(len(_PANELS))
    if entropy_target is not None:
        axes[1].axhline(entropy_target, color="black", linewidth=1, linestyle="--", label=f"target {entropy_target:g}")
    for axis, panel in zip(axes, _PANELS, strict=True):
        axis.set_title(panel.title)
        if panel.per_cent:
            axis.yaxis.set_major_formatter(PercentFormatter(1))
        for curve in panel.curves:
            _draw(axis, curve, rows, list(boundaries))
        if axis.get_legend_handles_labels()[1]:
            axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
        axis.set_ylim(0, max(panel.top, axis.get_ylim()[1]))
        for step, label in boundaries.items():
            axis.axvline(step, color=GREY, linewidth=1, linestyle=":")
            axis.text(step, 0.02, f" {label}", color=GREY, transform=axis.get_xaxis_transform())
    return as_svg(figure)


def _draw(axis: Axes, curve: Curve, rows: Iterable[Mapping[str, Any]], boundaries: Sequence[float]) -> None:
    """Draw the values where the metric was measured and finite; but for points, they are smoothed stage by stage."""
    points = [(float(row["step"]), float(row[curve.metric])) for row in rows if row.get(curve.metric) is not None]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    if curve.points:
        axis.plot(steps, values, "o-", color=curve.colour, label=curve.label, markersize=4)
        return
    axis.plot(steps, values, color=curve.colour, linewidth=1, alpha=0.3)
    stages = [sum(step > boundary for boundary in boundaries) for step in steps]
    smooth: list[float] = []
    for stage in sorted(set(stages)):
        smooth += smoothed([value for value, index in zip(values, stages, strict=True) if index == stage])
    axis.plot(steps, smooth, color=curve.colour, label=curve.label)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred mean over up to _SMOOTHED_STEPS values, fewer near the ends. 0, 3, 9 become 0, 4, 9."""
    reaches = [min(_SMOOTHED_STEPS // 2, i, len(values) - 1 - i) for i in range(len(values))]
    return [fmean(values[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]
