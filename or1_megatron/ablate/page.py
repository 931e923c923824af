"""The page of an ablation: the claim, the configuration's differences, curves, what was seen. Markdown and an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from or1_megatron.ablate.ablation import Ablation, Arm, Column, Scale, Window, differences
from or1_megatron.ablate.outcome import (
    ELAPSED,
    Rows,
    equal_times,
    estimate,
    look,
    mean_curve,
    value_at_time,
    value_over,
    with_columns,
)
from or1_megatron.report.figures.svg import GREY, GRID, INK, band, line, path, ticks
from or1_megatron.runtime.files import write_atomically

ArmRows = Mapping[str, Mapping[int, Rows]]
"""Arm's name -> seed -> rows of metrics, of the runs that have any."""

_COLOURS = ("#2f6fde", "#d9480f", "#0b8a6f", "#7048c6", "#c2255c", "#b08900", "#495057", "#1098ad")
_OF_THE_REPORT = 12
"""Ablations up to this number are the report's; those beyond are ours."""
_PANEL = (480, 260)
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 30, 30


def write_page(
    ablation: Ablation, scale: Scale, arms: Sequence[Arm], rows: ArmRows, folder: Path, command: str
) -> Path:
    """Write ``NN_name.md`` and ``NN_name.svg`` into ``folder``; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, chosen = ablation.path.stem, ablation.at(scale)
    rows = {
        name: {seed: with_columns(run, chosen.columns) for seed, run in by_seed.items()}
        for name, by_seed in rows.items()
    }
    page, picture = folder / f"{stem}.md", folder / f"{stem}.svg"
    write_atomically(picture, draw(ablation.watch, rows, chosen.equal_time).encode(), "the ablation's curves")
    write_atomically(page, _text(ablation, scale, arms, rows, picture.name, command).encode(), "the ablation's page")
    return page


def _text(ablation: Ablation, scale: Scale, arms: Sequence[Arm], rows: ArmRows, picture: str, command: str) -> str:
    chosen = ablation.at(scale)
    claimed = "Claimed (RECIPE section 5)" if ablation.number <= _OF_THE_REPORT else "Expected"
    ran = {name: len(by_seed) for name, by_seed in rows.items() if by_seed}
    parts = [
        f"# Ablation {ablation.number}: {ablation.title}",
        f"**{claimed}**: {ablation.claim.strip()}",
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
    if chosen.columns:
        parts.append(_column_legend(chosen.columns))
    if chosen.equal_time:
        parts += ["## At equal wall time", _time_table(ablation.watch, rows)]
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


def _column_legend(columns: Mapping[str, Column]) -> str:
    said = []
    for name, column in columns.items():
        origin = "its value a step before" if column.away_from is None else f"{column.away_from:g}"
        said.append(f"`{name}`: by how much `{column.metric}` differs from {origin}.")
    return " ".join(said)


def _time_table(watch: Sequence[str], rows: ArmRows) -> str:
    """Each arm at the seconds that the seed's fastest arm took for all its steps."""
    until_s = equal_times(rows.values())
    if not until_s:
        return "Not yet: no seed of which every arm is finished."
    lines = [
        "At the seconds of training that the seed's fastest arm took for all its steps ("
        + ", ".join(f"seed {seed}: {seconds:.0f} s" for seed, seconds in until_s.items())
        + "; start-up and evaluations apart). Metrics are means over the last quarter of those seconds.",
        "",
        "| arm | seconds per step | steps done by then | " + " | ".join(f"`{metric}`" for metric in watch) + " |",
        "|---" * (len(watch) + 3) + "|",
    ]
    for name, by_seed in rows.items():
        runs = {seed: by_seed[seed] for seed in until_s}
        pace = estimate([run[-1][ELAPSED] / float(run[-1]["step"]) for run in runs.values()])
        done = estimate(
            [float(sum(r["step"] > 0 and r[ELAPSED] <= until_s[s] for r in run)) for s, run in runs.items()]
        )
        found = [[value_at_time(run, metric, until_s[seed]) for seed, run in runs.items()] for metric in watch]
        cells = [str(estimate([value for value in values if value is not None])) for values in found]
        lines.append(f"| {name} | {pace} | {done} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _verdict_table(ablation: Ablation, scale: Scale, rows: ArmRows) -> str:
    lines = ["| claim | metric, window | comparison | difference | seen |", "|---|---|---|---|---|"]
    until_s = equal_times(rows.values())
    for expected in ablation.at(scale).expects:
        seen = look(expected, rows.get(expected.higher, {}), rows.get(expected.than, {}), until_s)
        margin = f" − {expected.margin:g}" if expected.margin else ""
        lines.append(
            f"| {expected.says} | `{expected.metric}`, {expected.window.replace('_', ' ')} | "
            f"{expected.higher} > {expected.than}{margin} | "
            f"{seen.difference} | **{seen.verdict}** |"
        )
    return "\n".join(lines)


def draw(watch: Sequence[str], rows: ArmRows, over_time: bool = False) -> str:
    """A panel per metric: each arm's mean over seeds as a line, the range between seeds as a band.

    ``over_time``: the first two once more, over the seconds of training.
    """
    width, height = _PANEL
    panels = [(metric, metric, "step") for metric in watch]
    if over_time:
        panels += [(f"{metric} by seconds of training", metric, ELAPSED) for metric in watch[:2]]
    down = -(-len(panels) // 2)
    legend = "".join(
        f'<tspan fill="{_COLOURS[i % len(_COLOURS)]}" dx="{14 if i else 0}">{escape(name)}</tspan>'
        for i, name in enumerate(rows)
    )
    body = [f'<text x="{_LEFT}" y="18" font-size="12" font-weight="600">{legend}</text>']
    for place, (title, metric, over) in enumerate(panels):
        body.append(f'<g transform="translate({place % 2 * width} {24 + place // 2 * height})">')
        body += _panel(title, [mean_curve(list(by_seed.values()), metric, over) for by_seed in rows.values()])
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


def _panel(title: str, curves: Sequence[Sequence[tuple[float, float, float, float]]]) -> list[str]:
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

    shapes = [f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600">{escape(title)}</text>']
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
