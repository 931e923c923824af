"""Draw a build on one page without network: the funnel, the sources, lengths and difficulty, as inline SVG."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from or1_megatron.data.pipeline.build import kept, ledger, newest_build
from or1_megatron.data.pipeline.records import Candidate
from or1_megatron.report.figures.style import as_svg, panels, styled
from or1_megatron.report.page.frame import html_page
from or1_megatron.runtime.files import write_atomically
from or1_verify.problems.rows import DIFFICULTY_TRIES

_EXAMPLES = 3  # of each reason


def write_page(build: Path, path: Path) -> None:
    """Draw the newest build in folder ``build``. Raises DataError when there is none."""
    finished, steps = newest_build(build)
    lengths: dict[str, Counter[int]] = defaultdict(Counter)  # by ability, in powers of two: they differ by magnitudes
    difficulty: dict[str, Counter[int]] = defaultdict(Counter)  # failures by model
    for row in kept(build):
        lengths[row.ability][max(len(row.statement), 1).bit_length() - 1] += 1
        for model, failures in row.difficulty.items():
            difficulty[model][failures] += 1
    left_out: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for step, exclusion in ledger(build):
        left_out[step, exclusion.reason].append(exclusion.candidate)
    last = steps[-1]
    parts = [
        f"<h1>{escape(str(build))}: {last.rows_out:,} of {steps[0].rows_in:,} problems</h1>",
        "" if finished else f"<p><b>Not finished</b>: as far as step “{escape(last.step)}”.</p>",
        "<h2>From step to step</h2>",
        _bars([(step.step, step.rows_out, f"−{step.rows_in - step.rows_out:,}") for step in steps]),
        "<h2>Sources</h2>",
        _sources_table(steps[0].sources, last.sources),
        "<h2>Statement lengths, characters</h2>",
    ]
    for name, counts in sorted(lengths.items()):
        bars = [(f"{1 << n:,}", counts[n]) for n in range(min(counts), max(counts) + 1)]
        parts.append(f"<p>{escape(name)}</p>{_histogram(bars)}")
    parts.append("<h2>Difficulty: failures in 16 tries</h2>")
    for name, counts in sorted(difficulty.items()):
        bars = [(str(n), counts[n]) for n in range(DIFFICULTY_TRIES + 1)]
        parts.append(f"<p>{escape(name)}</p>{_histogram(bars)}")
    parts += [
        "" if difficulty else '<p class="note">Not measured.</p>',
        "<h2>Why problems were left out</h2>",
        _reasons_table(left_out),
    ]
    write_atomically(path, html_page(str(build), "\n".join(parts)).encode(), "the report")


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


def _reasons_table(left_out: Mapping[tuple[str, str], Sequence[Candidate]]) -> str:
    rows = []
    for (step, reason), candidates in left_out.items():
        shown = "<br>".join(
            f"<code>{row.id}</code> {escape(' '.join(row.statement.split())[:110])}" for row in candidates[:_EXAMPLES]
        )
        rows.append(f'<tr><td>{escape(step)}<td>{escape(reason)}<td class="n">{len(candidates):,}<td>{shown}</tr>')
    return _table('<th>step<th>reason<th class="n">problems<th>such as', "".join(rows))


def _wide(drawn: str) -> str:
    """Return it at a fixed size, which scrolls in a narrow window: scaled letters could not be read."""
    return f'<div class="wide">{drawn}</div>'


def _table(head: str, rows: str) -> str:
    return _wide(f"<table><tr>{head}</tr>{rows}</table>")
