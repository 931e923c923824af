"""Sets that are known by name: where they are published, how their problems end, and what others scored on them."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from or1_megatron.data.files import SUFFIXES, is_hub_id, read_rows
from or1_megatron.data.layouts import detect_layout, read_published
from or1_megatron.data.problems import load_problems
from or1_megatron.data.rows import DataError, published_row
from or1_megatron.types import Message, Problem

BOX_INSTRUCTION: Final = " Let's think step by step and output the final answer within \\boxed{}."
"""Ends AIME24's problems in the paper's evaluation; AIME25's have none (RECIPE section 5)."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set by name. ``hub`` and ``split`` (None: all of it) are where it is had from when no file of that name is at
    hand."""

    hub: str
    split: str | None
    ending: str = ""
    samples: int = 32
    """k of avg@k in the report."""
    dated: bool = False
    """Rows carry a date, by which problems that a model may have been trained on are left out."""


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
"""Of LiveCodeBench, in the report: from the first day on, before the second."""


def published(name: str) -> dict[str, float]:
    """Model to per cent, for a known set; empty for any other."""
    if name not in BENCHMARKS:
        return {}
    place = list(BENCHMARKS).index(name)
    return {model: scores[place] for model, scores in PUBLISHED.items()}


def load_set(
    named: str, sets: Path, since: datetime.date | None = None, before: datetime.date | None = None
) -> tuple[str, list[Problem]]:
    """(name, problems) of a known name, a file, a folder or a hub id.

    A known name is looked for as a file or folder of that name in ``sets`` first, then on the hub. ``since`` and
    ``before`` keep the problems of that window (the first day is in it, the second is not).

    Raises:
        DataError: an unknown name, what cannot be read, a row without a date where a window is given, nothing left.
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
    if since is not None or before is not None:
        return name, _within(path, split, name, since, before)
    problems = load_problems(path, split=split)
    ending = benchmark.ending if benchmark is not None else ""
    return name, [_ending(problem, ending) for problem in problems]


def write_set(name: str, sets: Path, found_in: Path) -> tuple[Path, int]:
    """Write a known set as ``sets``/name.jsonl, as the report evaluated it: AIME24's problems with their ending,
    LiveCodeBench's of the report's window. ``found_in``: where files of that name are looked for before the hub.

    Returns:
        The file, which was replaced as a whole, and its problems.

    Raises:
        DataError: no known set, or what ``load_set`` raises.
    """
    if name not in BENCHMARKS:
        raise DataError(f"{name}: no known set; expected one of {', '.join(BENCHMARKS)}")
    window = REPORT_WINDOW if BENCHMARKS[name].dated else (None, None)
    _, problems = load_set(name, found_in, *window)
    sets.mkdir(parents=True, exist_ok=True)
    path = sets / f"{name}.jsonl"
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        for index, problem in enumerate(problems):
            row = published_row(
                problem.source, problem.messages, problem.ability, problem.ground_truth, {"index": index}
            )
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.replace(path)
    return path, len(problems)


def _place(name: str, benchmark: Benchmark, sets: Path) -> tuple[Path, str | None]:
    for candidate in (sets / f"{name}.jsonl", sets / f"{name}.parquet", sets / name):
        if candidate.exists():
            return candidate, None
    return Path(benchmark.hub), benchmark.split


def _ending(problem: Problem, ending: str) -> Problem:
    last = problem.messages[-1]
    if not ending or "\\boxed" in last.content:
        return problem
    return replace(problem, messages=(*problem.messages[:-1], Message(last.role, last.content + ending)))


def _within(
    path: Path, split: str | None, name: str, since: datetime.date | None, before: datetime.date | None
) -> list[Problem]:
    dates: list[datetime.date] = []
    for origin, raw in read_rows(path, split):
        dates.append(_date(raw, origin))
    problems = load_problems(path, split=split)
    kept = [
        problem
        for problem, date in zip(problems, dates, strict=True)
        if (since is None or date >= since) and (before is None or date < before)
    ]
    if not kept:
        raise DataError(
            f"{path}: none of {len(problems)} problems is from {since or 'the beginning'} on and before "
            f"{before or 'today'}; their dates: {min(dates)} to {max(dates)}"
        )
    return kept


def _date(raw: Any, origin: str) -> datetime.date:
    layout = detect_layout(raw) if isinstance(raw, dict) else None
    text = raw.get("date") if isinstance(raw, dict) else None
    if text is None and layout is not None:
        text = read_published(raw, layout, origin).notes.get("contest_date")
    try:
        return datetime.date.fromisoformat(str(text)[:10])
    except ValueError:
        raise DataError(
            f"{origin}: no date (found {text!r}); --since and --before need a column 'contest_date' or 'date', as in "
            "2024-08-31"
        ) from None
