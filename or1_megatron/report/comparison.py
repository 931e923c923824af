"""The comparison of two evaluations, as a page in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_EXCERPT_CHARS: Final = 80


def comparison_page(compared: Mapping[str, Any], most: int | None = None) -> str:
    """Return the page: scores, differences, and the problems that changed sides.

    Args:
        compared: a ``Comparison`` as a dict.
        most: problems per table; None: all.
    """
    otherwise = [f"{key} {one}, {two}" for key, (one, two) in compared["asked_otherwise"].items()]
    head = [
        *(f"{name}: {compared['models'][i]} ({compared['folders'][i]})" for i, name in enumerate(("first", "second"))),
        f"{compared['problems']:,} problems x {compared['samples']} samples each",
        *([f"asked otherwise (first, second): {'; '.join(otherwise)}"] if otherwise else []),
    ]
    parts = [
        "# Comparison of two evaluations",
        "\n".join(f"- {_plain(line)}" for line in head),
        _table(("", "first", "second", "difference", "95%, other samples", "95%, other problems"), _scores(compared)),
        "The difference is the second less the first, problem by problem. *Other samples*: a second run of both "
        "evaluations; *other problems*: another set of such problems, by a bootstrap over problems.",
    ]
    for key, which in (("gained", "second"), ("lost", "first")):
        rows = [_problem(changed, compared["samples"]) for changed in compared[key]]
        parts.append(f"## {len(rows)} problems that only the {which} solves in most samples")
        if rows:
            parts.append(_table(("problem", "source", "first", "second", "statement"), rows[:most]))
        if most is not None and len(rows) > most:
            parts.append(f"and {len(rows) - most} more")
    return "\n\n".join(parts) + "\n"


def _scores(compared: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            score["name"],
            f"{100 * score['first']:.1f}%",
            f"{100 * score['second']:.1f}%",
            f"{100 * score['difference']['value']:+.1f}",
            *(_between(score["difference"][kind]) for kind in ("samples", "problems")),
        ]
        for score in compared["scores"]
    ]


def _between(interval: Mapping[str, float]) -> str:
    return f"{100 * interval['low']:+.1f} to {100 * interval['high']:+.1f}"


def _problem(changed: Mapping[str, Any], samples: int) -> list[str]:
    problem, excerpt = changed["problem"], " ".join(changed["problem"]["prompt"].split())[:_EXCERPT_CHARS]
    return [problem["id"], problem["source"], *(f"{changed[one]}/{samples}" for one in ("first", "second")), excerpt]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return "".join(f"\\{letter}" if letter in "\\`*_|<>[]$" else letter for letter in text)
