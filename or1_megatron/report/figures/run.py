"""The figure of a run, as SVG: accuracy, entropy against its target, length and truncation over the steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from or1_megatron.report.figures.svg import GREY, INK, Axes, Points, document, dots, legend, line, path, text, ticks
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder

_WIDTH, _HEIGHT = 480, 280
"""Size of a panel; the figure has two by two."""

_SMOOTHED_STEPS = 9


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
    level: float | None = None
    """A horizontal line to compare with."""
    level_label: str = ""


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
    write_atomically(out, picture(rows, _entropy_target(folder)).encode(), "the run's picture")


def _entropy_target(folder: RunFolder) -> float | None:
    """Return the target of the run's entropy control; None if it has none."""
    if not folder.config.is_file():
        return None
    config = yaml.safe_load(folder.config.read_text()) or {}
    entropy = config.get("algorithm", {}).get("entropy", {})
    return float(entropy["target"]) if entropy.get("mode") == "adaptive" else None


def picture(rows: Sequence[Mapping[str, Any]], entropy_target: float | None) -> str:
    """Return the SVG of these rows, one per step, in order."""
    panels = (
        Panel(
            "accuracy",
            (
                Curve("accuracy/all", "training", "#2f6fde"),
                Curve("accuracy/non_truncated", "training, non-truncated", "#8fb4f2"),
                Curve("evaluation/accuracy", "held-out", "#d9480f", points=True),
            ),
            per_cent=True,
            top=1.0,
        ),
        Panel(
            "entropy, nats per token",
            (Curve("entropy/sampled", "e_k", "#0b8a6f"),),
            level=entropy_target,
            level_label="target",
        ),
        Panel(
            "response length, tokens", (Curve("length/mean", "mean", "#7048c6"), Curve("length/p95", "p95", "#b9a3e3"))
        ),
        Panel("truncated responses", (Curve("truncation/ratio", "training", "#c2255c"),), per_cent=True, top=0.1),
    )
    steps = [int(row["step"]) for row in rows]
    boundaries = [
        (int(row["step"]) - 0.5, f"T {row['stage/max_response_tokens']:g}")
        for earlier, row in pairwise([row for row in rows if "stage/index" in row])
        if row["stage/index"] != earlier["stage/index"]
    ]
    body = []
    for place, panel in enumerate(panels):
        body.append(f'<g transform="translate({place % 2 * _WIDTH:g} {place // 2 * _HEIGHT:g})">')
        body += _draw(panel, rows, (min(steps), max(max(steps), min(steps) + 1)), boundaries)
        body.append("</g>")
    return document(2 * _WIDTH, 2 * _HEIGHT, body)


def _draw(
    panel: Panel, rows: Sequence[Mapping[str, Any]], steps: tuple[int, int], boundaries: Sequence[tuple[float, str]]
) -> list[str]:
    """Return the elements of one panel."""
    curves = [(curve, _points(rows, curve.metric)) for curve in panel.curves]
    levels = ticks(max([*(value for _, points in curves for _, value in points), panel.level or 0.0, panel.top]))
    axes = Axes(x=steps, y=(0.0, levels[-1]), left=52, right=_WIDTH - 14, top=40, bottom=_HEIGHT - 30)
    lines = axes.frame(panel.title, levels, _per_cent if panel.per_cent else "{:g}".format) + axes.steps()
    lines += [line(axes.at(step, 0), axes.at(step, levels[-1]), GREY, dashes="2 3") for step, _ in boundaries]
    entries = []
    if panel.level is not None:
        lines.append(line(axes.at(steps[0], panel.level), axes.at(steps[1], panel.level), INK, dashes="6 4"))
        entries.append((f"{panel.level_label} {panel.level:g}", INK))
    for curve, points in curves:
        if not points:
            continue
        entries.append((curve.label, curve.colour))
        corners = [axes.at(*point) for point in points]
        if curve.points:
            lines += [path(corners, curve.colour, 1.5), *dots(corners, curve.colour)]
        else:
            smooth = [axes.at(*point) for point in _smoothed(points, [step for step, _ in boundaries])]
            lines += [path(corners, curve.colour, 1, opacity=0.3), path(smooth, curve.colour, 2)]
    halo = ' font-size="11" stroke="#ffffff" stroke-width="4" paint-order="stroke"'
    lines += [text(axes.at(step, 0)[0] + 4, axes.bottom - 6, label, more=halo) for step, label in boundaries]
    return [*lines, legend(entries, axes.right, 34, "end")]


def _per_cent(share: float) -> str:
    return f"{100 * share:g}%"


def _points(rows: Iterable[Mapping[str, Any]], metric: str) -> Points:
    """Return [(step, value)] where the metric was measured and finite."""
    return [(float(row["step"]), float(row[metric])) for row in rows if row.get(metric) is not None]


def _smoothed(points: Points, boundaries: Sequence[float]) -> Points:
    """Return the centred mean over up to _SMOOTHED_STEPS points of a stage, fewer near its ends."""
    stages = [sum(step > boundary for boundary in boundaries) for step, _ in points]
    smooth = []
    for i, (step, _) in enumerate(points):
        first, last = stages.index(stages[i]), len(stages) - 1 - stages[::-1].index(stages[i])
        reach = min(_SMOOTHED_STEPS // 2, i - first, last - i)
        window = [value for _, value in points[i - reach : i + reach + 1]]
        smooth.append((step, sum(window) / len(window)))
    return smooth
