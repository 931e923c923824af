"""A picture of a run, as SVG, from its metrics: accuracy, entropy against its target, length, truncation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

from or1_megatron.report.figures.svg import GREY, GRID, INK, Points, legend, line, path, ticks
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder

_WIDTH, _HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 40, 30
"""Margins of a panel, within its quarter of the picture."""

_SMOOTHED_STEPS = 9


@dataclass(frozen=True)
class Curve:
    """``metric`` of metrics.jsonl as a line; ``points``: measured now and then, so marked and not smoothed."""

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
    """The axis reaches at least this."""
    level: float | None = None
    """A horizontal line to compare with."""
    level_label: str = ""


def draw_run(run: Path, out: Path) -> None:
    """Draw ``run``'s metrics.jsonl to ``out``, whose name must end in .svg (else ValueError).

    Raises FileNotFoundError when the run has no metrics, ValueError when it has no finished step yet.
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
    """tgt-ent of the run's configuration; None when entropy is not controlled."""
    if not folder.config.is_file():
        return None
    config = yaml.safe_load(folder.config.read_text()) or {}
    entropy = config.get("algorithm", {}).get("entropy", {})
    return float(entropy["target"]) if entropy.get("mode") == "adaptive" else None


def picture(rows: Sequence[Mapping[str, Any]], entropy_target: float | None) -> str:
    """The SVG of these rows, one per step, in order."""
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
        x, y = place % 2 * _WIDTH / 2, place // 2 * _HEIGHT / 2
        body.append(f'<g transform="translate({x:g} {y:g})">')
        body += _draw(panel, rows, (min(steps), max(max(steps), min(steps) + 1)), boundaries)
        body.append("</g>")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _draw(
    panel: Panel, rows: Sequence[Mapping[str, Any]], steps: tuple[int, int], boundaries: Sequence[tuple[float, str]]
) -> list[str]:
    """One panel's elements, in a box of half the picture's width and height."""
    right, bottom = _WIDTH / 2 - _RIGHT, _HEIGHT / 2 - _BOTTOM
    curves = [(curve, _points(rows, curve.metric)) for curve in panel.curves]
    values = [value for _, points in curves for _, value in points]
    levels = ticks(max([*values, panel.level or 0.0, panel.top]))

    def at(step: float, value: float) -> tuple[float, float]:
        across = (step - steps[0]) / (steps[1] - steps[0])
        return _LEFT + across * (right - _LEFT), bottom - value / levels[-1] * (bottom - _TOP)

    lines = [f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600">{escape(panel.title)}</text>']
    for tick in levels:
        y = at(0, tick)[1]
        label = f"{100 * tick:g}%" if panel.per_cent else f"{tick:g}"
        lines.append(line((_LEFT, y), (right, y), GRID))
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{label}</text>')
    for step in ticks(steps[1]):
        if steps[0] <= step <= steps[1] and step == int(step):
            x = at(step, 0)[0]
            lines.append(f'<text x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle" fill="{GREY}">{step:g}</text>')
    lines += [line(at(step, 0), at(step, levels[-1]), GREY, dashes="2 3") for step, _ in boundaries]
    entries = []
    if panel.level is not None:
        y = at(0, panel.level)[1]
        lines.append(line((_LEFT, y), (right, y), INK, dashes="6 4"))
        entries.append((f"{panel.level_label} {panel.level:g}", INK))
    for curve, points in curves:
        if not points:
            continue
        entries.append((curve.label, curve.colour))
        if curve.points:
            lines.append(path([at(*point) for point in points], curve.colour, 1.5))
            lines += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.colour}"/>' for x, y in (at(*p) for p in points)
            ]
        else:
            lines.append(path([at(*point) for point in points], curve.colour, 1, opacity=0.3))
            lines.append(
                path([at(*point) for point in _smoothed(points, [step for step, _ in boundaries])], curve.colour, 2)
            )
    lines += [
        f'<text x="{at(step, 0)[0] + 4:.1f}" y="{bottom - 6:.1f}" font-size="11" fill="{GREY}" stroke="#ffffff" '
        f'stroke-width="4" paint-order="stroke">{escape(label)}</text>'
        for step, label in boundaries
    ]
    return lines + legend(entries, right)


def _points(rows: Iterable[Mapping[str, Any]], metric: str) -> Points:
    """Where the metric was measured and finite."""
    return [(float(row["step"]), float(row[metric])) for row in rows if row.get(metric) is not None]


def _smoothed(points: Points, boundaries: Sequence[float]) -> Points:
    """Centred moving mean over up to _SMOOTHED_STEPS points of the same stage; near an end as many on either side."""
    stages = [sum(step > boundary for boundary in boundaries) for step, _ in points]
    smooth = []
    for i, (step, _) in enumerate(points):
        first, last = stages.index(stages[i]), len(stages) - 1 - stages[::-1].index(stages[i])
        reach = min(_SMOOTHED_STEPS // 2, i - first, last - i)
        window = [value for _, value in points[i - reach : i + reach + 1]]
        smooth.append((step, sum(window) / len(window)))
    return smooth
