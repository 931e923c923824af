"""Sets known by name: where they are published, how their problems end, and the scores of published models."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from or1_megatron.data.files import SUFFIXES, is_hub_id, read_rows
from or1_megatron.data.layouts import detect_layout, read_published
from or1_megatron.data.problems import load_problems
from or1_megatron.data.rows import DataError, RowError, published_row
from or1_megatron.data.unusable import UnusableRows
from or1_megatron.runtime.files import write_atomically
from or1_megatron.types import Message, Problem

BOX_INSTRUCTION: Final = " Let's think step by step and output the final answer within \\boxed{}."
"""Ends AIME24's problems in the paper's evaluation; AIME25's have none (RECIPE section 5)."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set by name. ``hub`` and ``split`` (None: all of it) say where it comes from if there is no such file here."""

    hub: str
    split: str | None
    ending: str = ""
    samples: int = 32
    """k of avg@k in the report."""
    dated: bool = False
    """Rows have a date, by which problems that a model may have been trained on are left out."""


BENCHMARKS: Final = {
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", BOX_INSTRUCTION),
    "aime25": Benchmark("yentinglin/aime_2025", "train"),
    "livecodebench": Benchmark("livecodebench/code_generation_lite", None, samples=4, dated=True),
}

PUBLISHED: Final = {
    # AIME24 avg@32, AIME25 avg@32, LiveCodeBench (2024-08 to 2025-02) avg@4; 32,768 tokens, temperature 1, top-p 1
    "DeepSeek-R1-Distill-Qwen-7B": (55.5, 39.2, 37.6),
    "Skywork-OR1-Math-7B": (69.8, 52.3, 43.6),
    "Skywork-OR1-7B": (70.2, 54.6, 47.6),
    "DeepSeek-R1-Distill-Qwen-32B": (72.9, 59.0, 57.2),
    "Skywork-OR1-32B": (82.2, 73.3, 63.0),
    "Qwen3-32B": (81.4, 72.9, 65.7),
    "DeepSeek-R1": (79.8, 70.0, 65.9),
}
"""Per cent, from the Skywork-OR1 report (RECIPE section 4)."""

REPORT_WINDOW: Final = (datetime.date(2024, 8, 1), datetime.date(2025, 2, 1))
"""LiveCodeBench in the report: from the first day on, before the second."""


def published(name: str) -> dict[str, float]:
    """Return model -> per cent, for a known set; empty for any other."""
    if name not in BENCHMARKS:
        return {}
    place = list(BENCHMARKS).index(name)
    return {model: scores[place] for model, scores in PUBLISHED.items()}


def load_set(
    named: str,
    sets: Path,
    since: datetime.date | None = None,
    before: datetime.date | None = None,
    unusable: UnusableRows | None = None,
) -> tuple[str, list[Problem]]:
    """Return (name, problems) of a known name, a file, a folder or a hub id.

    A known name is looked for as a file or folder of that name in ``sets`` first, then on the hub. ``since`` and
    ``before`` keep the problems of that window (the first day is in it, the second is not).

    Args:
        unusable: takes the rows that cannot be used, those without a date in a window among them; None: they are
            refused.

    Raises:
        DataError: an unknown name, a set that cannot be read, unusable rows, or no problem in the window.
    """
    path = Path(named)
    if path.exists() or path.suffix in SUFFIXES:
        name, split, benchmark = path.stem if path.is_file() else path.name, None, BENCHMARKS.get(path.stem)
    elif named in BENCHMARKS:
        benchmark = BENCHMARKS[named]
        name, (path, split) = named, _place(named, benchmark, sets)
    elif is_hub_id(path):
        name, split, benchmark = path.name, None, None
    else:
        raise DataError(
            f"--data {named}: no such file, and no known set; known: {', '.join(BENCHMARKS)}; else expected a .jsonl "
            "or .parquet file, a folder of them, or a hub id (owner/name)"
        )
    faults = UnusableRows() if unusable is None else unusable
    problems = load_problems(path, split, faults)
    if since is not None or before is not None:
        problems = _within(path, split, problems, since, before, faults)
    if unusable is None:
        faults.refuse()
    ending = benchmark.ending if benchmark is not None else ""
    return name, [_with_ending(problem, ending) for problem in problems]


def write_set(name: str, sets: Path, found_in: Path) -> tuple[Path, int]:
    """Write a known set as ``sets``/name.jsonl, as the report evaluated it; return the file and its number of problems.

    AIME24's problems get their ending, LiveCodeBench's are those of the report's window. ``found_in``: where files of
    that name are looked for before the hub.

    Raises:
        DataError: no known set, or what ``load_set`` raises.
    """
    if name not in BENCHMARKS:
        raise DataError(f"{name}: no known set; expected one of {', '.join(BENCHMARKS)}")
    window = REPORT_WINDOW if BENCHMARKS[name].dated else (None, None)
    _, problems = load_set(name, found_in, *window)
    sets.mkdir(parents=True, exist_ok=True)
    path = sets / f"{name}.jsonl"
    rows = (
        published_row(problem.source, problem.messages, problem.ability, problem.ground_truth, {"index": index})
        for index, problem in enumerate(problems)
    )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(path, lines.encode(), "the problems")
    return path, len(problems)


def _place(name: str, benchmark: Benchmark, sets: Path) -> tuple[Path, str | None]:
    for candidate in (sets / f"{name}.jsonl", sets / f"{name}.parquet", sets / name):
        if candidate.exists():
            return candidate, None
    return Path(benchmark.hub), benchmark.split


def _with_ending(problem: Problem, ending: str) -> Problem:
    last = problem.messages[-1]
    if not ending or "\\boxed" in last.content:
        return problem
    return replace(problem, messages=(*problem.messages[:-1], Message(last.role, last.content + ending)))


def _within(
    path: Path,
    split: str | None,
    problems: list[Problem],
    since: datetime.date | None,
    before: datetime.date | None,
    unusable: UnusableRows,
) -> list[Problem]:
    rows = {problem.origin: problem for problem in problems}
    dated: list[tuple[datetime.date, Problem]] = []
    for origin, raw in read_rows(path, split):
        if origin in rows:
            try:
                dated.append((_date(raw, origin), rows[origin]))
            except RowError as error:
                unusable.add(error)
    kept = [
        problem for date, problem in dated if (since is None or date >= since) and (before is None or date < before)
    ]
    if dated and not kept:
        days = [date for date, _ in dated]
        raise DataError(
            f"{path}: none of {len(dated)} problems is from {since or 'the beginning'} on and before "
            f"{before or 'today'}; their dates: {min(days)} to {max(days)}"
        )
    return kept


def _date(raw: Mapping[str, Any], origin: str) -> datetime.date:
    text, layout = raw.get("date"), detect_layout(raw)
    if text is None and layout is not None:
        text = read_published(raw, layout, origin).notes.get("contest_date")
    try:
        return datetime.date.fromisoformat(str(text)[:10])
    except ValueError:
        raise RowError(
            origin,
            "no date",
            f"no date (found {text!r}); --since and --before need a column 'contest_date' or 'date', as in 2024-08-31",
        ) from None
