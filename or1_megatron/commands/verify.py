"""``or1 verify``: judge recorded responses, a file of rows in and the same rows with their verdicts out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.data.problems import read_problem
from or1_megatron.data.rows import DataError, shown
from or1_megatron.data.verifier_threads import VerifierThreads, judged
from or1_megatron.types import Problem, Verdict, VerdictStatus
from or1_megatron.verify.registry import build_verifiers, known_abilities

_ADDED = ("reward", "status", "detail")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One row: as it was read, and what a verifier needs of it."""

    row: Mapping[str, Any]
    problem: Problem
    response: str
    truncated: bool


def verify_file(
    path: Path, out: Path, config: VerifyConfig, workers: int, explain: bool, console: Console
) -> Mapping[str, Counter[str]]:
    """Judge every row of ``path`` (.jsonl or .parquet) and write it to ``out``; returns counts by source and status.

    Everything is checked before the first verdict. An ``out`` that holds the first verdicts of the same rows is gone
    on with; all are written in the order of the rows, each as soon as those before it are.

    Raises DataError naming the row: no response, a ground truth that cannot be used, or an ``out`` of another file.
    """
    recorded = list(read_recorded(path))
    if not recorded:
        raise DataError(f"{path}: holds no rows; expected problems with a 'response' each")
    abilities = {item.problem.ability for item in recorded}
    known = known_abilities(config)
    for item in recorded:
        if item.problem.ability not in known:
            raise DataError(
                f"{item.problem.origin}: field 'ability': found '{item.problem.ability}', expected one of: "
                f"{', '.join(sorted(known))}"
            )
    done = _resumed(out, recorded)
    tally: dict[str, Counter[str]] = {}
    of_workers = config.model_copy(update={"workers": workers})
    with closing(_KeepGoing(lambda: build_verifiers(of_workers, abilities), workers)) as threads:
        _check(threads, (item.problem for item in recorded))
        with out.open("a", encoding="utf-8") as file:
            for item, row in zip(recorded, done, strict=False):
                _count(tally, item, row["status"])
            for item, verdict in judged(
                recorded[len(done) :], lambda it: threads.verdict(it.problem, it.response, it.truncated)
            ):
                row = {**item.row, "reward": verdict.reward, "status": verdict.status, "detail": verdict.detail}
                file.write(json.dumps(row) + "\n")
                file.flush()
                _count(tally, item, verdict.status)
                if explain:
                    _explain(console, item, verdict)
    console.print(_table(tally))
    return tally


def read_recorded(path: Path) -> Iterator[Recorded]:
    """The rows of a .jsonl or .parquet file. Raises DataError naming file:line and field."""
    for origin, row in _rows(path):
        problem = read_problem(row, origin, default_source=path.stem)
        response, truncated = row.get("response"), row.get("truncated", False)
        if not isinstance(response, str):
            raise DataError(f"{origin}: field 'response': found {shown(response)}, expected the response's text")
        if not isinstance(truncated, bool | None):
            raise DataError(f"{origin}: field 'truncated': found {shown(truncated)}, expected true or false")
        yield Recorded(row, problem, response, bool(truncated))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: file name ends in '{path.suffix}'; expected .jsonl or .parquet")
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected rows of problems with a 'response' each")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq  # only here: it takes a while to import

        for number, row in enumerate(pq.read_table(path).to_pylist(), start=1):
            yield f"{path}:{number}", row
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield f"{path}:{number}", json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}:{number}: not a JSON object ({error}), found {shown(line[:80])}") from None


def _check(threads: VerifierThreads, problems: Iterable[Problem]) -> None:
    """Raise DataError for the first ground truth that cannot be used."""
    seen = set()
    for problem in problems:
        key = (problem.ability, problem.ground_truth)
        if key not in seen and (why := threads.check(problem)):
            raise DataError(f"{problem.origin}: field 'ground_truth': {why}")
        seen.add(key)


class _KeepGoing(VerifierThreads):
    """Turns what a verifier raises into a verdict, so that one row never ends the rest."""

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        try:
            return super().verify(problem, response, truncated)
        except Exception as error:
            return Verdict(0.0, "error", "", f"the verifier raised {type(error).__name__}: {error}"[:1000], 0.0)


def _resumed(out: Path, recorded: list[Recorded]) -> list[Mapping[str, Any]]:
    """The verdicts that ``out`` already holds; a torn last line is cut off. Raises DataError."""
    if not out.exists():
        return []
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found = json.loads(line)
            fits = number <= len(recorded) and _same_row(found, recorded[number - 1].row)
        except (ValueError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise DataError(
                f"{out}:{number}: is no verdict on row {number} of the input; name another --out, or delete it"
            )
        done.append(found)
    if len(whole) < len(content):
        os.truncate(out, len(whole))
    return done


def _same_row(found: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    kept = {name: value for name, value in found.items() if name not in _ADDED}
    given = {name: value for name, value in row.items() if name not in _ADDED}
    return kept == json.loads(json.dumps(given)) and found["status"] in get_args(VerdictStatus)


def _count(tally: dict[str, Counter[str]], item: Recorded, status: str) -> None:
    tally.setdefault(item.problem.source, Counter())[status] += 1


def _explain(console: Console, item: Recorded, verdict: Verdict) -> None:
    answer = shown(verdict.answer) if verdict.answer else "no answer"
    text = f"{item.problem.origin}  {verdict.status}  {item.problem.source}  {verdict.detail}  [{answer}]"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(tally: Mapping[str, Counter[str]]) -> Table:
    statuses = [status for status in get_args(VerdictStatus) if any(counts[status] for counts in tally.values())]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("source")
    for name in ("rows", "reward", *statuses):
        table.add_column(name, justify="right", no_wrap=True)
    total: Counter[str] = sum(tally.values(), Counter())
    rows = [*sorted(tally.items()), *([("all", total)] if len(tally) > 1 else [])]
    for source, counts in rows:
        count = counts.total()
        table.add_row(source, str(count), f"{counts['right'] / count:.3f}", *(str(counts[name]) for name in statuses))
    return table
