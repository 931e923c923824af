"""An evaluation's results in the terminal and as a picture: accuracy by response length, and by context budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from or1_megatron.report.figures.svg import GREY, GRID, INK, line, path, ticks

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 36, 44
_UPRIGHT_PX = 44  # of a label such as 131,072
_COLOUR, _BAR = "#2f6fde", "#8fb4f2"


def show_evaluation(results: Mapping[str, Any], published: Mapping[str, float], console: Console) -> None:
    """The table: scores with intervals, statuses, and beside them what others scored on a known set."""
    outcome = results["outcome"]
    k = outcome["samples"]
    table = Table(
        "", "score", "95%, other samples", "95%, other problems", title=f"{results['data']}: {results['model']}",
        title_justify="left", box=None,
    )  # fmt: skip
    table.add_row(f"avg@{k}", *_cells(outcome["average"]), style="bold")
    for size, score in outcome["passed"].items():
        table.add_row(f"pass@{size}", *_cells(score))
    console.print(table)
    mean = outcome["mean_tokens"]
    length = "response lengths unknown" if mean is None else f"mean response {mean:,.1f} tokens"
    statuses = ", ".join(f"{status} {count:,}" for status, count in sorted(outcome["statuses"].items()))
    console.print(
        f"{outcome['problems']:,} problems x {k} samples; {length}; truncated {outcome['truncation_ratio']:.1%}; "
        + statuses,
        highlight=False,
    )
    if published:
        known = Table("reported", "", title="From the Skywork-OR1 report", title_justify="left", box=None)
        for model, score in sorted(published.items(), key=lambda item: item[1]):
            known.add_row(model, f"{score:.1f}%")
        known.add_row("this evaluation", f"{100 * outcome['average']['value']:.1f}%", style="bold")
        console.print(known)


def _cells(score: Mapping[str, Any]) -> tuple[str, str, str]:
    samples, problems = (
        f"{100 * score[kind]['low']:.1f} – {100 * score[kind]['high']:.1f}" for kind in ("samples", "problems")
    )
    return f"{100 * score['value']:.1f}%", samples, problems


def draw_evaluation(results: Mapping[str, Any]) -> str:
    """The SVG; a panel says so where lengths are unknown."""
    outcome = results["outcome"]
    body = [
        *_panel(0, "accuracy by response length, tokens", _bars(outcome["by_length"])),
        *_panel(_WIDTH, "accuracy by context budget, tokens", _curve(outcome["by_budget"])),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" width="{2 * _WIDTH}" '
            f'height="{_HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(x: float, title: str, shapes: Sequence[str]) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    lines = [
        f'<g transform="translate({x:g} 0)">',
        f'<text x="{_LEFT}" y="20" font-size="13" font-weight="600">{title}</text>',
    ]
    for level in ticks(1.0):
        y = _y(level)
        lines.append(line((_LEFT, y), (right, y), GRID))
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{100 * level:g}%</text>')
    if not shapes:
        lines.append(f'<text x="{_LEFT + 8}" y="{bottom - 12}" fill="{GREY}">response lengths are not known</text>')
    return [*lines, *shapes, "</g>"]


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _bars(bins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Bars of one width each, since the bins hold about as many responses each; their edges below."""
    if not bins:
        return []
    width = (_WIDTH - _RIGHT - _LEFT) / len(bins)
    shapes = []
    for i, found in enumerate(bins):
        x, y = _LEFT + i * width, _y(found["accuracy"])
        shapes.append(
            f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" height="{_y(0) - y:.1f}" fill="{_BAR}">'
            f"<title>{found['low']} to {found['high'] - 1} tokens: {found['accuracy']:.1%} of {found['responses']}"
            "</title></rect>"
        )
        shapes.append(_below(x, f"{found['low']:,}", width))
    shapes.append(_below(_WIDTH - _RIGHT, f"{bins[-1]['high'] - 1:,}", width))
    return shapes


def _curve(budgets: Mapping[str, float]) -> list[str]:
    if not budgets:
        return []
    step = (_WIDTH - _RIGHT - _LEFT) / max(1, len(budgets) - 1)
    points = [(_LEFT + i * step, _y(share)) for i, share in enumerate(budgets.values())]
    shapes = [path(points, _COLOUR, 2)]
    shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOUR}"/>' for x, y in points]
    shapes += [_below(x, f"{int(budget):,}", step) for (x, _), budget in zip(points, budgets, strict=True)]
    return shapes


def _below(x: float, text: str, room: float) -> str:
    """Under the axis: upright where ``room`` pixels up to the next one are enough, else slanting."""
    y = _HEIGHT - _BOTTOM + 16
    if room >= _UPRIGHT_PX:
        x = min(x, _WIDTH - _UPRIGHT_PX / 2)
        return f'<text x="{x:.1f}" y="{y}" text-anchor="middle" font-size="11" fill="{GREY}">{text}</text>'
    return (
        f'<text x="{x:.1f}" y="{y}" text-anchor="end" font-size="10" fill="{GREY}" '
        f'transform="rotate(-30 {x:.1f} {y})">{text}</text>'
    )
