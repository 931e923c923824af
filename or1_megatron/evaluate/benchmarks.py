"""The benchmarks that have names (AIME24, LiveCodeBench, ...): where each is found, its k, prompt ending and dates."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from or1_megatron.data.problems import SUFFIXES, PlacedRow, is_hub_id, load_problems, read_rows
from or1_megatron.runtime.files import write_atomically
from or1_verify.problems.rows import DataError, RowError, published_row
from or1_verify.problems.unusable import FILE_NAME, UnusableRows
from or1_verify.problems.wording import BOX_INSTRUCTION
from or1_verify.types import Message, Problem


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark, and where it is on the Hugging Face hub: ``hub``, ``split`` (None: all) and ``subset``."""

    hub: str
    split: str | None
    ending: str = ""
    """Text that is added to each problem that does not mention ``\\boxed`` itself."""
    samples: int = 1
    """k of avg@k in the paper, and the default of ``--k``; 1 for benchmarks that the paper does not have."""
    dated: bool = False
    """Whether rows have a date, so that problems on which a model may have been trained can be left out."""
    subset: str | None = None


BENCHMARKS: Final = {
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", BOX_INSTRUCTION, samples=32),
    "aime25": Benchmark("yentinglin/aime_2025", "train", samples=32),
    "livecodebench": Benchmark("livecodebench/code_generation_lite", None, samples=4, dated=True),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", BOX_INSTRUCTION),
    "amc23": Benchmark("math-ai/amc23", "test", BOX_INSTRUCTION),
    "minerva": Benchmark("math-ai/minervamath", "test", BOX_INSTRUCTION),
    "olympiadbench": Benchmark("math-ai/olympiadbench", "test", BOX_INSTRUCTION),
    "gsm8k": Benchmark("openai/gsm8k", "test", BOX_INSTRUCTION, subset="main"),
    "humaneval": Benchmark("openai/openai_humaneval", "test"),
    "mbpp": Benchmark("google-research-datasets/mbpp", "test", subset="full"),
}

REPORT_WINDOW: Final = (datetime.date(2024, 8, 1), datetime.date(2025, 2, 1))
"""The paper uses LiveCodeBench's problems between these dates (source: the released ``prepare_unit_test_data``)."""

_RELEASE_FILE = re.compile(r"(?:^|/)test(\d*)\.jsonl:\d+$")


@dataclass(frozen=True, slots=True)
class LoadedSet:
    """The problems of an evaluation set that are within the window of dates."""

    name: str
    problems: list[Problem]
    outside: int
    """Number of usable problems outside the window of dates."""
    release: str
    """LiveCodeBench's release, such as release_v5; "" for other sets."""

    def __str__(self) -> str:
        """Return the set's name, number of problems and release."""
        of = f" of {len(self.problems) + self.outside}" if self.outside else ""
        return f"{self.name}: {len(self.problems)}{of} problems" + (f" of {self.release}" if self.release else "")


def load_set(
    named: str,
    sets: Path,
    since: datetime.date | None = None,
    until: datetime.date | None = None,
    unusable: UnusableRows | None = None,
) -> LoadedSet:
    """Load an evaluation set. ``named`` is the name of a benchmark, a file, a folder or a hub id.

    A benchmark is first looked for as a file or folder of its name in ``sets``, then on the hub. ``since`` and
    ``until`` select problems by date. As in LiveCodeBench, the window reaches from midnight at the beginning of the day
    ``since`` to midnight at the beginning of ``until``, inclusive. A date without a time of day counts as midnight.

    Args:
        unusable: collects the rows that cannot be used; if there is a window, also rows without a date. None: any
            such row raises DataError.

    Raises:
        DataError: the name is unknown, the set cannot be read, rows are unusable, or no problem is in the window.
    """
    path = Path(named)
    split = subset = None
    if path.exists() or path.suffix in SUFFIXES:
        name, benchmark = path.stem if path.is_file() else path.name, BENCHMARKS.get(path.stem)
    elif named in BENCHMARKS:
        name, benchmark = named, BENCHMARKS[named]
        path, split, subset = _source(named, benchmark, sets)
    elif is_hub_id(path):
        name, benchmark = path.name, None
    else:
        raise DataError(
            f"--data {named}: no such file, and no known set; known: {', '.join(BENCHMARKS)}; else expected a .jsonl "
            "or .parquet file, a folder of them, or a hub id (owner/name)"
        )
    faults = UnusableRows() if unusable is None else unusable
    everything = problems = load_problems(path, split, faults, subset)
    dated = benchmark is not None and benchmark.dated
    if since is not None or until is not None:
        dated, problems = True, _within(read_rows(path, split, subset), path, everything, since, until, faults)
    if unusable is None:
        faults.refuse()
    ending = benchmark.ending if benchmark is not None else ""
    return LoadedSet(
        name,
        [_with_ending(problem, ending) for problem in problems],
        len(everything) - len(problems),
        _release(path, split, everything) if dated else "",
    )


def write_set(name: str, sets: Path, found_in: Path) -> tuple[Path, LoadedSet]:
    """Write a benchmark to ``sets``/name.jsonl in the form that the paper evaluates; return (the file, the set).

    Problems get the benchmark's ending; of LiveCodeBench's problems, those in the paper's window are written.
    ``found_in``: a folder. A file or folder of the benchmark's name in it is read instead of the hub.

    Raises:
        DataError: the benchmark is unknown, rows are unusable, or ``load_set`` raises DataError. If there are too many
            unusable rows for the message, ``sets``/name.unusable_rows.jsonl lists them.
    """
    if name not in BENCHMARKS:
        raise DataError(f"{name}: no known set; expected one of {', '.join(BENCHMARKS)}")
    since, until = REPORT_WINDOW if BENCHMARKS[name].dated else (None, None)
    faults = UnusableRows()
    loaded = load_set(name, found_in, since, until, faults)
    faults.refuse(sets / f"{name}.{FILE_NAME}")
    sets.mkdir(parents=True, exist_ok=True)
    path = sets / f"{name}.jsonl"
    release = {"release": loaded.release} if loaded.release else {}
    rows = (
        published_row(p.source, p.messages, p.ability, p.ground_truth, {"index": index, **release})
        for index, p in enumerate(loaded.problems)
    )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(path, lines.encode(), "the problems")
    return path, loaded


def _source(name: str, benchmark: Benchmark, sets: Path) -> tuple[Path, str | None, str | None]:
    """Return the (path, split, subset) from which a benchmark is read: a file or folder in ``sets``, else the hub."""
    for candidate in (sets / f"{name}.jsonl", sets / f"{name}.parquet", sets / name):
        if candidate.exists():
            return candidate, None, None
    return Path(benchmark.hub), benchmark.split, benchmark.subset


def _release(path: Path, split: str | None, problems: Sequence[Problem]) -> str:
    """Return the name of LiveCodeBench's release. release_vN has the files test.jsonl, test2.jsonl, ..., testN.jsonl.

    In a file that ``write_set`` wrote, the rows name the release.
    """
    files = {match[1] or "1" for problem in problems if (match := _RELEASE_FILE.search(problem.origin))}
    numbers = sorted(map(int, files))
    if numbers and numbers == list(range(1, len(numbers) + 1)):
        return f"release_v{len(numbers)}"
    _, first = next(read_rows(path, split))
    extra = first.get("extra_info") if isinstance(first, Mapping) else None
    named = extra.get("release") if isinstance(extra, Mapping) else None
    return str(named or f"a release that is not named ({path})")


def _with_ending(problem: Problem, ending: str) -> Problem:
    last = problem.messages[-1]
    if not ending or "\\boxed" in last.content:
        return problem
    return replace(problem, messages=(*problem.messages[:-1], Message(last.role, last.content + ending)))


def _within(
    placed: Iterator[PlacedRow],
    path: Path,
    problems: list[Problem],
    since: datetime.date | None,
    until: datetime.date | None,
    unusable: UnusableRows,
) -> list[Problem]:
    first = _midnight(since or datetime.date.min)
    last = datetime.datetime.max if until is None else _midnight(until)
    rows = {problem.origin: problem for problem in problems}
    dated: list[tuple[datetime.datetime, Problem]] = []
    for origin, raw in placed:
        if origin in rows:
            try:
                dated.append((_date(raw, origin), rows[origin]))
            except RowError as error:
                unusable.add(error)
    kept = [problem for date, problem in dated if first <= date <= last]
    if dated and not kept:
        days = [date.date() for date, _ in dated]
        raise DataError(
            f"{path}: none of {len(dated)} problems is from {since or 'the beginning'} to {until or 'today'}; their "
            f"dates: {min(days)} to {max(days)}"
        )
    return kept


def _midnight(day: datetime.date) -> datetime.datetime:
    return datetime.datetime.combine(day, datetime.time())


def _date(raw: Mapping[str, Any], origin: str) -> datetime.datetime:
    text = raw.get("date", raw.get("contest_date"))
    try:
        return datetime.datetime.fromisoformat(str(text)).replace(tzinfo=None)
    except ValueError:
        raise RowError(
            origin,
            "no date",
            f"no date (found {text!r}); --since and --until need a column 'contest_date' or 'date', as in 2024-08-31",
        ) from None
