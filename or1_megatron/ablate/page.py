"""The page of an ablation: the claim, the configuration's differences, curves, what was seen. Markdown and an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from or1_megatron.ablate.ablation import Ablation, Arm, Scale, differences
from or1_megatron.ablate.outcome import Rows, Window, estimate, look, mean_curve, value_over
from or1_megatron.report.svg import GREY, GRID, INK, band, line, path, ticks
from or1_megatron.runtime.files import write_atomically

ArmRows = Mapping[str, Mapping[int, Rows]]
"""Arm's name -> seed -> rows of metrics, of the runs that have any."""

_COLOURS = ("#2f6fde", "#d9480f", "#0b8a6f", "#7048c6", "#c2255c", "#b08900", "#495057", "#1098ad")
_PANEL = (480, 260)
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 30, 30


def write_page(
    ablation: Ablation, scale: Scale, arms: Sequence[Arm], rows: ArmRows, folder: Path, command: str
) -> Path:
    """Write ``NN_name.md`` and ``NN_name.svg`` into ``folder``; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = ablation.path.stem
    page, picture = folder / f"{stem}.md", folder / f"{stem}.svg"
    write_atomically(picture, draw(ablation.watch, rows).encode(), "the ablation's curves")
    write_atomically(page, _text(ablation, scale, arms, rows, picture.name, command).encode(), "the ablation's page")
    return page


def _text(ablation: Ablation, scale: Scale, arms: Sequence[Arm], rows: ArmRows, picture: str, command: str) -> str:
    chosen = ablation.at(scale)
    ran = {name: len(by_seed) for name, by_seed in rows.items() if by_seed}
    parts = [
        f"# Ablation {ablation.number}: {ablation.title}",
        f"**Claimed** (RECIPE section 5): {ablation.claim.strip()}",
    ]
    if chosen.note:
        parts.append(f"**This scale** ({scale}): {chosen.note.strip()}")
    parts += ["## What differs between the arms", _difference_table(arms), "Nothing else does, but seed and folder."]
    if not ran:
        return "\n\n".join([*parts, "## Not yet run", f"Command: `{command}`", ""])
    seeds = ", ".join(str(seed) for seed in chosen.seeds)
    parts += [
        "## What was seen",
        f"Command: `{command}`. Seeds {seeds}, fixed beforehand; finished runs by arm: "
        + ", ".join(f"{name} {count}" for name, count in ran.items())
        + ". Means over seeds ± half a 95% confidence interval (Student's t; with three seeds it is wide).",
        f"![curves: means over the seeds, with the range between them]({picture})",
        _value_table(ablation.watch, rows),
    ]
    if chosen.expects:
        parts += ["## The claim's comparisons", _verdict_table(ablation, scale, rows)]
    return "\n\n".join([*parts, ""])


def _difference_table(arms: Sequence[Arm]) -> str:
    lines = ["| key | " + " | ".join(arm.name for arm in arms) + " |", "|---" * (len(arms) + 1) + "|"]
    lines += [f"| `{key}` | " + " | ".join(values) + " |" for key, values in differences(arms).items()]
    return "\n".join(lines)


def _value_table(watch: Sequence[str], rows: ArmRows) -> str:
    windows: list[tuple[str, Window]] = [("first quarter", "early"), ("last quarter", "late")]
    lines = ["| arm | | " + " | ".join(f"`{metric}`" for metric in watch) + " |", "|---" * (len(watch) + 2) + "|"]
    for name, by_seed in rows.items():
        for label, window in windows:
            cells = []
            for metric in watch:
                found = [value_over(run, metric, window) for run in by_seed.values()]
                cells.append(str(estimate([value for value in found if value is not None])))
            lines.append(f"| {name} | {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _verdict_table(ablation: Ablation, scale: Scale, rows: ArmRows) -> str:
    lines = ["| claim | metric, window | comparison | difference | seen |", "|---|---|---|---|---|"]
    for expected in ablation.at(scale).expects:
        seen = look(expected, rows.get(expected.higher, {}), rows.get(expected.than, {}))
        lines.append(
            f"| {expected.says} | `{expected.metric}`, {expected.window} | {expected.higher} > {expected.than} | "
            f"{seen.difference} | **{seen.verdict}** |"
        )
    return "\n".join(lines)


def draw(watch: Sequence[str], rows: ArmRows) -> str:
    """A panel per metric: each arm's mean over seeds as a line, the range between seeds as a band."""
    width, height = _PANEL
    down = -(-len(watch) // 2)
    legend = "".join(
        f'<tspan fill="{_COLOURS[i % len(_COLOURS)]}" dx="{14 if i else 0}">{escape(name)}</tspan>'
        for i, name in enumerate(rows)
    )
    body = [f'<text x="{_LEFT}" y="18" font-size="12" font-weight="600">{legend}</text>']
    for place, metric in enumerate(watch):
        body.append(f'<g transform="translate({place % 2 * width} {24 + place // 2 * height})">')
        body += _panel(metric, [mean_curve(list(by_seed.values()), metric) for by_seed in rows.values()])
        body.append("</g>")
    size = f'viewBox="0 0 {2 * width} {24 + down * height}" width="{2 * width}" height="{24 + down * height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12" '
            f'fill="{INK}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(metric: str, curves: Sequence[Sequence[tuple[float, float, float, float]]]) -> list[str]:
    right, bottom = _PANEL[0] - _RIGHT, _PANEL[1] - _BOTTOM
    points = [point for curve in curves for point in curve]
    last = max([point[0] for point in points], default=1.0) or 1.0
    lowest = min([point[2] for point in points], default=0.0)
    levels = ticks(max([point[3] for point in points], default=1.0))
    floor = min(0.0, lowest)

    def at(step: float, value: float) -> tuple[float, float]:
        return (
            _LEFT + step / last * (right - _LEFT),
            bottom - (value - floor) / (levels[-1] - floor) * (bottom - _TOP),
        )

    shapes = [f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600">{escape(metric)}</text>']
    for level in levels:
        y = at(0, level)[1]
        shapes.append(line((_LEFT, y), (right, y), GRID))
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{level:g}</text>')
    for step in ticks(last):
        if step <= last and step == int(step):
            x = at(step, floor)[0]
            shapes.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="{GREY}">{step:g}</text>')
    for i, curve in enumerate(curves):
        if not curve:
            continue
        colour = _COLOURS[i % len(_COLOURS)]
        shapes.append(band([at(p[0], p[2]) for p in curve], [at(p[0], p[3]) for p in curve], colour))
        shapes.append(path([at(p[0], p[1]) for p in curve], colour, 1.8))
    return shapes
