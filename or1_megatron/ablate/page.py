"""The page of an ablation, as Markdown and SVG: the claim, how the arms differ, curves, and the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from math import isnan
from pathlib import Path

from or1_megatron.ablate.ablation import Ablation, Arm, Arms, Column, Expectation, Scale, Window, differences
from or1_megatron.ablate.outcome import (
    ELAPSED,
    ArmRows,
    EntryResult,
    compare,
    equal_times,
    mean_curve,
    value_at_time,
    value_over,
    with_columns,
)
from or1_megatron.ablate.statistics import estimate
from or1_megatron.report.figures.svg import Axes, band, document, legend, path, ticks
from or1_megatron.runtime.files import write_atomically

_COLOURS = (
    "#2f6fde",
    "#d9480f",
    "#0b8a6f",
    "#7048c6",
    "#c2255c",
    "#b08900",
    "#495057",
    "#1098ad",
    "#868e96",
    "#5c940d",
)
_OF_THE_REPORT = 12
"""Ablations up to this number are from the report; those with a higher number are ours."""
_WIDTH, _HEIGHT = 480, 260
"""Size of a panel, px."""


def write_page(
    ablation: Ablation,
    scale: Scale,
    arms: Sequence[Arm],
    rows: ArmRows,
    folder: Path,
    command: str,
    entry: Sequence[EntryResult] = (),
) -> Path:
    """Write ``NN_name.md`` and ``NN_name.svg`` into ``folder``, and return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, chosen = ablation.path.stem, ablation.at(scale)
    rows = {
        name: {seed: with_columns(run, chosen.columns) for seed, run in by_seed.items()}
        for name, by_seed in rows.items()
    }
    page, picture = folder / f"{stem}.md", folder / f"{stem}.svg"
    write_atomically(picture, draw(ablation.watch, rows, chosen.equal_time).encode(), "the ablation's curves")
    parts = (
        _head(ablation, scale, arms) + _entry(chosen, entry) + _results(ablation, scale, rows, picture.name, command)
    )
    write_atomically(page, "\n\n".join([*parts, ""]).encode(), "the ablation's page")
    return page


def _head(ablation: Ablation, scale: Scale, arms: Sequence[Arm]) -> list[str]:
    chosen = ablation.at(scale)
    claimed = "Claim of the report (docs/recipe.md, section 5)" if ablation.number <= _OF_THE_REPORT else "Expected"
    parts = [
        f"# Ablation {ablation.number}: {ablation.title}",
        f"**{claimed}**: {ablation.claim.strip()}",
    ]
    if chosen.note:
        parts.append(f"**This scale** ({scale}): {chosen.note.strip()}")
    return [
        *parts,
        "## What differs between the arms",
        _difference_table(arms),
        "All other keys are equal, except seed and folder.",
    ]


def _entry(chosen: Arms, entry: Sequence[EntryResult]) -> list[str]:
    """Return the section of the conditions of entry; nothing where there is none."""
    if not chosen.entry:
        return []
    cells = []
    for condition, seen in zip_longest(chosen.entry, entry):
        sides = ((">", condition.above), ("<", condition.below))
        bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in sides if bound is not None)
        value, verdict = "not measured", "–"
        if seen is not None and seen.value is not None:
            value, verdict = f"{seen.value:.4f}", "**met**" if seen.met else "**not met**"
        where = f"`{condition.metric}` of {condition.arm}, {condition.window}"
        cells.append([condition.says, where, bounds, value, verdict])
    return [
        "## Condition of entry",
        f"Measured by a run with seed {chosen.entry_seed} before the arms run; unless it is met, they do not run.",
        _table(["condition", "metric, window", "expected", "measured", ""], cells),
    ]


def _results(ablation: Ablation, scale: Scale, rows: ArmRows, picture: str, command: str) -> list[str]:
    chosen = ablation.at(scale)
    ran = {name: len(by_seed) for name, by_seed in rows.items() if by_seed}
    if not ran:
        return ["## Not yet run", f"Command: `{command}`"]
    seeds = ", ".join(str(seed) for seed in chosen.seeds)
    parts = [
        "## Results",
        f"Command: `{command}`. Seeds {seeds}, chosen beforehand unless the text above says otherwise; "
        "finished runs by arm: "
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
        parts += [
            "## The claim's comparisons",
            "One interval of 95% in twenty excludes its true value by chance. So the verdict rests on the corrected "
            f"interval (Holm's correction over the {len(chosen.expects)} comparisons): where every difference is 0, or "
            "minus its margin, the chance that any of them is resolved is 5% or less.",
            _verdict_table(chosen.expects, rows),
        ]
    return parts


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def _code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _difference_table(arms: Sequence[Arm]) -> str:
    rows = ([f"`{key}`", *values] for key, values in differences(arms).items())
    return _table(["key", *(arm.name for arm in arms)], rows)


def _value_table(watch: Sequence[str], rows: ArmRows) -> str:
    windows: tuple[tuple[str, Window], ...] = (("first quarter", "early"), ("last quarter", "late"))
    cells = (
        [name, label, *(estimate(value_over(run, metric, window) for run in by_seed.values()) for metric in watch)]
        for name, by_seed in rows.items()
        for label, window in windows
    )
    return _table(["arm", "", *_code(watch)], cells)


def _column_legend(columns: Mapping[str, Column]) -> str:
    return " ".join(
        f"`{name}`: how much `{column.metric}` differs from "
        + ("its value a step before." if column.away_from is None else f"{column.away_from:g}.")
        for name, column in columns.items()
    )


def _time_table(watch: Sequence[str], rows: ArmRows) -> str:
    """Return the table of each arm at the seconds that the seed's fastest arm took for all its steps."""
    until_s = equal_times(rows.values())
    if not until_s:
        return "Not yet: no seed has finished in every arm."
    cells = []
    for name, by_seed in rows.items():
        runs = {seed: by_seed[seed] for seed in until_s}
        pace = estimate(run[-1][ELAPSED] / float(run[-1]["step"]) for run in runs.values())
        done = estimate(float(sum(r["step"] > 0 and r[ELAPSED] <= until_s[s] for r in run)) for s, run in runs.items())
        values = (estimate(value_at_time(run, metric, until_s[s]) for s, run in runs.items()) for metric in watch)
        cells.append([name, pace, done, *values])
    return (
        "At the seconds of training that the seed's fastest arm took for all its steps ("
        + ", ".join(f"seed {seed}: {seconds:.0f} s" for seed, seconds in until_s.items())
        + "; without start-up and evaluations). Metrics are means over the last quarter of those seconds.\n\n"
        + _table(["arm", "seconds per step", "steps done by then", *_code(watch)], cells)
    )


def _verdict_table(expects: Sequence[Expectation], rows: ArmRows) -> str:
    cells = []
    for expected, found in zip(expects, compare(expects, rows, equal_times(rows.values())), strict=True):
        measured = f"`{expected.metric}`, {expected.window.replace('_', ' ')}"
        margin = f" − {expected.margin:g}" if expected.margin else ""
        within = f", none within {expected.within:g}" if expected.within else ""
        arms = f"{expected.higher} > {expected.than}{margin}{within}"
        holm = "–" if isnan(found.corrected.half_width) else f"± {found.corrected.half_width:.3f}"
        cells.append([expected.says, measured, arms, found.difference, holm, f"**{found.verdict}**"])
    return _table(["claim", "metric, window", "comparison", "difference", "corrected", "seen"], cells)


def draw(watch: Sequence[str], rows: ArmRows, over_time: bool = False) -> str:
    """Return an SVG with a panel per metric: each arm's mean over the seeds as a line, their range as a band.

    ``over_time``: repeat the first two metrics over the seconds of training.
    """
    panels = [(metric, metric, "step") for metric in watch]
    if over_time:
        panels += [(f"{metric} by seconds of training", metric, ELAPSED) for metric in watch[:2]]
    body = [legend([(name, _COLOURS[i % len(_COLOURS)]) for i, name in enumerate(rows)], 52, 18, "start")]
    for place, (title, metric, over) in enumerate(panels):
        body.append(f'<g transform="translate({place % 2 * _WIDTH} {24 + place // 2 * _HEIGHT})">')
        body += _panel(title, [mean_curve(list(by_seed.values()), metric, over) for by_seed in rows.values()])
        body.append("</g>")
    return document(2 * _WIDTH, 24 + -(-len(panels) // 2) * _HEIGHT, body)


def _panel(title: str, curves: Sequence[Sequence[tuple[float, float, float, float]]]) -> list[str]:
    points = [point for curve in curves for point in curve]
    levels = ticks(max([point[3] for point in points], default=1.0))
    axes = Axes(
        x=(0.0, max([point[0] for point in points], default=1.0) or 1.0),
        y=(min([point[2] for point in points] + [0.0]), levels[-1]),
        left=52,
        right=_WIDTH - 14,
        top=30,
        bottom=_HEIGHT - 30,
    )
    shapes = axes.frame(title, levels) + axes.steps()
    for i, curve in enumerate(curves):
        if curve:
            colour = _COLOURS[i % len(_COLOURS)]
            means, lows, highs = ([axes.at(point[0], point[which]) for point in curve] for which in (1, 2, 3))
            shapes += [band(lows, highs, colour), path(means, colour, 1.8)]
    return shapes
