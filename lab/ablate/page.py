"""The page of an ablation, as Markdown and SVG: the claim, how the arms differ, curves, and the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import fmean

from lab.ablate.ablation import Ablation, Arm, Arms, Column, Expectation, Scale, differences
from lab.ablate.outcome import ELAPSED, ArmRows, compare, equal_times, value_at_time, value_over, with_columns
from lab.ablate.statistics import estimate
from or1_megatron.report.figures.style import as_svg, panels, styled
from or1_megatron.runtime.files import write_atomically

_OF_THE_REPORT = 12
"""Ablations up to this number are from the paper; ablations with a higher number are ours."""


def write_page(
    ablation: Ablation,
    scale: Scale,
    arms: Sequence[Arm],
    rows: ArmRows,
    entry: Sequence[float | None],
    folder: Path,
    command: str,
) -> Path:
    """Write ``NN_name.md`` and ``NN_name.svg`` into ``folder``, and return the page's path.

    ``entry``: the values of the conditions of entry (``outcome.measure``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = ablation.at(scale)
    rows = {
        name: {seed: with_columns(run, chosen.columns) for seed, run in by_seed.items()}
        for name, by_seed in rows.items()
    }
    page = folder / f"{ablation.path.stem}.md"
    picture = page.with_suffix(".svg")
    parts = [
        *_head(ablation, scale, arms),
        *_entry(chosen, entry),
        *_results(ablation, chosen, rows, picture.name, command),
    ]
    if any(rows.values()):
        write_atomically(picture, draw(ablation.watch, rows, chosen.equal_time).encode(), "the ablation's curves")
    write_atomically(page, "\n\n".join([*parts, ""]).encode(), "the ablation's page")
    return page


def _head(ablation: Ablation, scale: Scale, arms: Sequence[Arm]) -> list[str]:
    note = ablation.at(scale).note.strip()
    claimed = "Claim of the report (docs/recipe.md, section 5)" if ablation.number <= _OF_THE_REPORT else "Expected"
    return [
        f"# Ablation {ablation.number}: {ablation.title}",
        f"**{claimed}**: {ablation.claim.strip()}",
        *([f"**This scale** ({scale}): {note}"] if note else []),
        "## What differs between the arms",
        _table(
            ["key", *(arm.name for arm in arms)], ([f"`{key}`", *values] for key, values in differences(arms).items())
        ),
        "All other keys are equal, except seed and folder.",
    ]


def _entry(chosen: Arms, values: Sequence[float | None]) -> list[str]:
    """Return the lines of the section on conditions of entry; no lines if there are no conditions."""
    if not chosen.entry:
        return []
    cells = []
    for condition, value in zip(chosen.entry, values, strict=True):
        where = f"`{condition.metric}` of {condition.arm}, {condition.window}"
        met = "–" if value is None else "**met**" if condition.met(value) else "**not met**"
        measured = "not measured" if value is None else f"{value:.4f}"
        cells.append([condition.says, where, condition.bounds(), measured, met])
    return [
        "## Condition of entry",
        f"Measured by a run with seed {chosen.entry_seed} before the arms run; unless it is met, they do not run.",
        _table(["condition", "metric, window", "expected", "measured", ""], cells),
    ]


def _results(ablation: Ablation, chosen: Arms, rows: ArmRows, picture: str, command: str) -> list[str]:
    if not any(rows.values()):
        return ["## Not yet run", f"Command: `{command}`"]
    seeds = ", ".join(str(seed) for seed in chosen.seeds)
    parts = [
        "## Results",
        f"Command: `{command}`. Seeds {seeds}, chosen beforehand unless the text above says otherwise; "
        "finished runs by arm: "
        + ", ".join(f"{name} {len(by_seed)}" for name, by_seed in rows.items() if by_seed)
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


def _value_table(watch: Sequence[str], rows: ArmRows) -> str:
    cells = []
    for name, by_seed in rows.items():
        early = [estimate(value_over(run, metric, "early") for run in by_seed.values()) for metric in watch]
        late = [estimate(value_over(run, metric, "late") for run in by_seed.values()) for metric in watch]
        cells += [[name, "first quarter", *early], [name, "last quarter", *late]]
    return _table(["arm", "", *(f"`{metric}`" for metric in watch)], cells)


def _column_legend(columns: Mapping[str, Column]) -> str:
    return " ".join(
        f"`{name}`: how much `{column.metric}` differs from "
        + ("its value a step before." if column.away_from is None else f"{column.away_from:g}.")
        for name, column in columns.items()
    )


def _time_table(watch: Sequence[str], rows: ArmRows) -> str:
    """Return a table with each arm's values at the time that the seed's fastest arm took for all steps."""
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
        + _table(["arm", "seconds per step", "steps done by then", *(f"`{metric}`" for metric in watch)], cells)
    )


def _verdict_table(expects: Sequence[Expectation], rows: ArmRows) -> str:
    cells = []
    for expected, outcome in zip(expects, compare(expects, rows, equal_times(rows.values())), strict=True):
        measured = f"`{expected.metric}`, {expected.window.replace('_', ' ')}"
        margin = f" − {expected.margin:g}" if expected.margin else ""
        within = f", none within {expected.within:g}" if expected.within else ""
        arms = f"{expected.higher} > {expected.than}{margin}{within}"
        holm = "–" if isnan(outcome.corrected.half_width) else f"± {outcome.corrected.half_width:.3f}"
        cells.append([expected.says, measured, arms, outcome.difference, holm, f"**{outcome.verdict}**"])
    return _table(["claim", "metric, window", "comparison", "difference", "corrected", "seen"], cells)


@styled
def draw(watch: Sequence[str], rows: ArmRows, over_time: bool) -> str:
    """Return an SVG with a panel per metric. An arm's mean over the seeds is a line, the seeds' range a band.

    ``over_time``: also draw the first two metrics over the seconds of training.
    """
    drawn = [(metric, metric, "step") for metric in watch]
    if over_time:
        drawn += [(f"{metric} by seconds of training", metric, ELAPSED) for metric in watch[:2]]
    figure, axes = panels(len(drawn), height=2.7)
    for panel, (title, metric, over) in zip(axes, drawn, strict=True):
        panel.set_title(title)
        for index, (name, by_seed) in enumerate(rows.items()):
            if curve := mean_curve(by_seed, metric, over):
                x, mean, low, high = zip(*curve, strict=True)
                panel.plot(x, mean, color=f"C{index}", label=name)
                panel.fill_between(x, low, high, color=f"C{index}", alpha=0.12, linewidth=0)
        panel.set_ylim(bottom=min(0.0, panel.dataLim.y0))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=5)
    return as_svg(figure)


def mean_curve(
    runs: Mapping[int, Sequence[Mapping[str, float]]], metric: str, over: str = "step"
) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, lowest, highest) at each step, over the seeds that have the metric at this step.

    ``over``: the column whose mean over the same seeds is x.
    """
    by_step: dict[int, list[tuple[float, float]]] = {}
    for rows in runs.values():
        for row in rows:
            if row.get(metric) is not None:
                by_step.setdefault(int(row["step"]), []).append((float(row[over]), float(row[metric])))
    curve = []
    for _, points in sorted(by_step.items()):
        x, values = zip(*points, strict=True)
        curve.append((fmean(x), fmean(values), min(values), max(values)))
    return curve
