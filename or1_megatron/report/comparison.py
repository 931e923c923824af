"""The comparison of two evaluations: tables for the console, and the same as a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_SHOWN: Final = 20
"""Problems per table on the console; the page has all."""
_EXCERPT_CHARS: Final = 80
_PROBLEMS: Final = ("problem", "source", "first", "second", "statement")


def show_comparison(found: Mapping[str, Any], console: Console) -> None:
    """Print ``found``, a ``Comparison`` as a dict: scores, differences, and the problems that changed sides."""
    for line in _head(found):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    table = Table(*_scores_header(), box=None)
    for row in _scores(found):
        table.add_row(*row)
    console.print(table)
    for title, rows in _changed(found):
        console.print(title, highlight=False, soft_wrap=True, style="bold")
        if rows:
            table = Table(*_PROBLEMS, box=None)
            for row in rows[:_SHOWN]:
                table.add_row(*row)
            console.print(table)
        if len(rows) > _SHOWN:
            console.print(f"and {len(rows) - _SHOWN} more", highlight=False)


def comparison_page(found: Mapping[str, Any]) -> str:
    """Return the page."""
    parts = ["# Comparison of two evaluations", "\n".join(f"- {_cell(line)}" for line in _head(found))]
    parts.append(_markdown(_scores_header(), _scores(found)))
    parts.append(
        "The difference is the second less the first, problem by problem. *Other samples*: a second run of both "
        "evaluations; *other problems*: another set of such problems, by a bootstrap over problems."
    )
    for title, rows in _changed(found):
        parts.append(f"## {title}")
        if rows:
            parts.append(_markdown(_PROBLEMS, rows))
    return "\n\n".join(parts) + "\n"


def _head(found: Mapping[str, Any]) -> list[str]:
    places = [f"{place}: {model} ({folder})" for place, model, folder in _both(found)]
    otherwise = [f"{key} {one}, {two}" for key, (one, two) in found["asked_otherwise"].items()]
    same = f"{found['problems']:,} problems x {found['samples']} samples each"
    return [*places, same, *([f"asked otherwise (first, second): {'; '.join(otherwise)}"] if otherwise else [])]


def _both(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return list(zip(("first", "second"), found["models"], found["folders"], strict=True))


def _scores_header() -> tuple[str, ...]:
    return ("", "first", "second", "difference", "95%, other samples", "95%, other problems")


def _scores(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            score["name"],
            f"{100 * score['first']:.1f}%",
            f"{100 * score['second']:.1f}%",
            f"{100 * score['difference']['value']:+.1f}",
            *(_between(score["difference"][kind]) for kind in ("samples", "problems")),
        ]
        for score in found["scores"]
    ]


def _between(interval: Mapping[str, float]) -> str:
    return f"{100 * interval['low']:+.1f} to {100 * interval['high']:+.1f}"


def _changed(found: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return a title and rows for the problems gained, and for those lost."""
    k = found["samples"]
    tables = []
    for key, which in (("gained", "second"), ("lost", "first")):
        rows = [
            [
                changed["problem"]["id"],
                changed["problem"]["source"],
                f"{changed['first']}/{k}",
                f"{changed['second']}/{k}",
                " ".join(changed["problem"]["prompt"].split())[:_EXCERPT_CHARS],
            ]
            for changed in found[key]
        ]
        tables.append((f"{len(rows)} problems that only the {which} solves in most samples", rows))
    return tables


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return "".join(f"\\{letter}" if letter in "\\`*_|<>[]$" else letter for letter in text)
