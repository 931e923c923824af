"""Draw a build on one page without network: the funnel, the sources, lengths and difficulty, as inline SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.build import manifests, read_state
from or1_megatron.data.pipeline.ledger import entries
from or1_megatron.data.pipeline.records import read_candidates
from or1_megatron.report.figures.style import as_svg, panels, styled
from or1_megatron.report.page.frame import html_page
from or1_megatron.runtime.files import write_atomically
from or1_verify.problems.problem import DIFFICULTY_TRIES

_EXAMPLES = 3  # of each reason


def write_page(build: Path, path: Path) -> None:
    """Draw the newest build in folder ``build``. Raises DataError when there is none."""
    state, steps = read_state(build), manifests(build)
    lengths, difficulty = _of_the_kept(build)
    reasons = Counter[tuple[str, str]]()
    examples: dict[tuple[str, str], list[Any]] = {}
    for entry in entries(build):
        key = (entry.step, entry.reason)
        reasons[key] += 1
        if len(examples.setdefault(key, [])) < _EXAMPLES:
            examples[key].append(entry)
    last = steps[-1]
    parts = [
        f"<h1>{escape(str(build))}: {last.rows_out:,} of {steps[0].rows_in:,} problems</h1>",
        "" if state["finished"] else f"<p><b>Not finished</b>: as far as step “{escape(last.step)}”.</p>",
        "<h2>From step to step</h2>",
        _bars([(step.step, step.rows_out, f"−{step.rows_in - step.rows_out:,}") for step in steps]),
        "<h2>Sources</h2>",
        _sources_table(steps[0].sources, last.sources),
        "<h2>Statement lengths, characters</h2>",
        *(f"<p>{escape(name)}</p>{_histogram(_binned(counts))}" for name, counts in sorted(lengths.items())),
        "<h2>Difficulty: failures in 16 tries</h2>",
        *(
            f"<p>{escape(model)}</p>" + _histogram([(str(n), counts[n]) for n in range(DIFFICULTY_TRIES + 1)])
            for model, counts in sorted(difficulty.items())
        ),
        "" if difficulty else '<p class="note">Not measured.</p>',
        "<h2>Why problems were left out</h2>",
        _reasons_table(reasons, examples),
    ]
    write_atomically(path, html_page(str(build), "\n".join(parts)).encode(), "the report")


def _of_the_kept(build: Path) -> tuple[dict[str, Counter[int]], dict[str, Counter[int]]]:
    """Return (statement lengths by ability, failures by model) of the kept problems."""
    lengths: dict[str, Counter[int]] = {}
    difficulty: dict[str, Counter[int]] = {}
    for shard in manifests(build)[-1].candidate_shards(build):
        for rows in read_candidates(shard):
            for row in rows:
                lengths.setdefault(row.ability, Counter())[len(row.statement)] += 1
                for model, failures in row.difficulty.items():
                    difficulty.setdefault(model, Counter())[failures] += 1
    return lengths, difficulty


def _binned(counts: Mapping[int, int]) -> list[tuple[str, int]]:
    """Bin by powers of two: lengths are spread over orders of magnitude."""
    bins: Counter[int] = Counter()
    for length, count in counts.items():
        bins[max(length, 1).bit_length() - 1] += count
    return [(f"{1 << n:,}", bins[n]) for n in range(min(bins, default=0), max(bins, default=0) + 1)]


@styled
def _bars(rows: Sequence[tuple[str, int, str]]) -> str:
    """Draw horizontal bars: name, length, and a remark at the right."""
    names, values, remarks = zip(*rows, strict=True)
    figure, (axes,) = panels(1, width=8.6, height=0.5 + 0.25 * len(rows))
    bars = axes.barh(range(len(rows)), values)
    axes.bar_label(bars, [f"{value:,} {remark}" for value, remark in zip(values, remarks, strict=True)], padding=3)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    return _wide(as_svg(figure))


@styled
def _histogram(bars: Sequence[tuple[str, int]]) -> str:
    labels, counts = zip(*bars, strict=True)
    figure, (axes,) = panels(1, width=8.6, height=1.8)
    axes.bar_label(axes.bar(labels, counts), [f"{count:,}" for count in counts])
    axes.margins(y=0.15)
    return _wide(as_svg(figure))


def _sources_table(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{count:,}</td><td class="n">{after.get(name, 0):,}</td>'
        f'<td class="n">{100 * after.get(name, 0) / count:.1f}%</td></tr>'
        for name, count in sorted(before.items(), key=lambda item: -item[1])
    )
    return _table('<th>source<th class="n">read<th class="n">kept<th class="n">share', rows)


def _reasons_table(reasons: Mapping[tuple[str, str], int], examples: Mapping[tuple[str, str], Sequence[Any]]) -> str:
    rows = []
    for (step, reason), count in reasons.items():
        shown = "<br>".join(
            f"<code>{entry.id}</code> {escape(' '.join(entry.statement.split())[:110])}"
            for entry in examples[step, reason]
        )
        rows.append(f'<tr><td>{escape(step)}<td>{escape(reason)}<td class="n">{count:,}<td>{shown}</tr>')
    return _table('<th>step<th>reason<th class="n">problems<th>such as', "".join(rows))


def _wide(drawn: str) -> str:
    """Return it at a fixed size, which scrolls in a narrow window: scaled letters could not be read."""
    return f'<div class="wide">{drawn}</div>'


def _table(head: str, rows: str) -> str:
    return _wide(f"<table><tr>{head}</tr>{rows}</table>")
