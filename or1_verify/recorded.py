"""Judges a file of recorded responses for ``or1-verify``, and writes its rows with their verdicts to another file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from or1_verify.config import VerifyConfig
from or1_verify.problems.problem import check_ground_truth, no_verifier, read_problem
from or1_verify.problems.rows import DataError, RowError, parquet_rows, shown
from or1_verify.problems.unusable import Policy, UnusableRows
from or1_verify.types import Attempt, Problem, Verdict, VerdictStatus
from or1_verify.verifier_threads import VerifierThreads, judged
from or1_verify.verifiers import build_verifiers, known_abilities

_ADDED = ("reward", "status", "detail")
_TRIED = 20


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One row of the input: a JSON object, or ``{"not_json": ...}`` for a line without a JSON object.

    A row has either ``attempt``, which a verifier can judge, or ``error``, which says why the row cannot be judged.
    """

    row: Mapping[str, Any]
    origin: str
    source: str
    attempt: Attempt | None = None
    error: RowError | None = None


def verify_file(
    path: Path,
    out: Path,
    config: VerifyConfig,
    unusable: Policy = "refuse",
    report: Callable[[RecordedRow, Verdict], None] | None = None,
) -> Mapping[str, Counter[str]]:
    """Judge every row of ``path`` (.jsonl or .parquet) and write it to ``out``; return counts by source and status.

    All rows are checked before the first verdict. Rows that cannot be used raise DataError, or, with ``unusable``
    drop, get the status ``error``. If ``out`` already holds verdicts on the first rows, only verdicts on the other rows
    are added. Verdicts are written in the order of the rows; ``config.workers`` rows are judged at once. ``report`` is
    called with each new verdict.

    Raises:
        DataError: ``path`` has no rows or unusable ones; or ``out`` is the input, holds other rows, or has no folder.
    """
    if path.exists() and out.exists() and out.samefile(path):
        raise DataError(f"{out}: is the input; expected another file for the verdicts (--out)")
    if not out.parent.is_dir():
        raise DataError(f"{out}: there is no folder {out.parent}; expected one that exists (--out)")
    rows = list(read_recorded(path, known_abilities(config)))
    if not rows:
        raise DataError(f"{path}: holds no rows; expected problems with a 'response' each")
    abilities = {row.attempt[0].ability for row in rows if row.attempt}
    tally: dict[str, Counter[str]] = {}
    with closing(_KeepGoing(partial(build_verifiers, config, abilities), config.workers)) as threads:
        rows = _checked(rows, threads)
        faults = UnusableRows()
        for row in rows:
            if row.error:
                faults.add(row.error)
        faults.settle(unusable, out.with_name(f"{out.stem}.unusable_rows.jsonl"), "--unusable drop")
        done = _resumed(out, rows)
        with out.open("a", encoding="utf-8") as file:
            for row, written in zip(rows, done, strict=False):
                _count(tally, row, written["status"])
            for row, verdict in judged(rows[len(done) :], threads.start_row):
                added = {"reward": verdict.reward, "status": verdict.status, "detail": verdict.detail}
                file.write(_as_json({**row.row, **added}) + "\n")
                file.flush()
                _count(tally, row, verdict.status)
                if report is not None:
                    report(row, verdict)
    return tally


def try_verifier(
    path: Path, verifier: str, config: VerifyConfig, report: Callable[[RecordedRow, Verdict], None]
) -> None:
    """Judge the first 20 rows of ``path``, of any ability, by the user's own ``verifier``, and write no file.

    Raises DataError if no row can be judged, VerifierBroken if the verifier cannot be loaded.
    """
    rows = list(islice(read_recorded(path, None), _TRIED))
    abilities = {row.attempt[0].ability for row in rows if row.attempt}
    if not abilities:
        raise DataError(f"{path}: " + (f"no row can be tried; the first: {rows[0].error}" if rows else "holds no rows"))
    config = config.model_copy(update={"custom": dict.fromkeys(abilities, verifier)})
    with closing(_KeepGoing(partial(build_verifiers, config, abilities), 1)) as threads:
        for row, verdict in judged(_checked(rows, threads), threads.start_row):
            report(row, verdict)


def read_recorded(path: Path, known: Collection[str] | None) -> Iterator[RecordedRow]:
    """Yield the rows of a .jsonl or .parquet file of responses. Raises DataError if the file cannot be read.

    Args:
        known: abilities that can be verified; None: all.
    """
    for origin, raw in _rows(path):
        try:
            problem, response, truncated = _attempt(raw, origin, path.stem)
            if known is not None and problem.ability not in known:
                raise no_verifier(problem, known)
            yield RecordedRow(raw, origin, problem.source, (problem, response, truncated))
        except RowError as error:
            given = raw if isinstance(raw, dict) else {"not_json": str(error) if isinstance(raw, RowError) else raw}
            source = given.get("data_source") or given.get("source")
            yield RecordedRow(given, origin, source if isinstance(source, str) else path.stem, error=error)


def _attempt(row: Any, origin: str, default_source: str) -> Attempt:
    problem = read_problem(row, origin, default_source)
    response, truncated = row.get("response"), row.get("truncated", False)
    if not isinstance(response, str):
        detail = f"field 'response': found {shown(response)}, expected the response's text"
        raise RowError(origin, "no response", detail)
    if not isinstance(truncated, bool | None):
        detail = f"field 'truncated': found {shown(truncated)}, expected true or false"
        raise RowError(origin, "field 'truncated' has a wrong type", detail)
    return problem, response, bool(truncated)


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: file name ends in '{path.suffix}'; expected .jsonl or .parquet")
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected rows of problems with a 'response' each")
    if path.suffix == ".parquet":
        yield from parquet_rows(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                origin = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    fault = f"not a JSON object ({error}), found {shown(line[:80])}"
                    row = RowError(origin, "not a JSON object", fault)
                yield origin, row


class _KeepGoing(VerifierThreads):
    """Verifier threads that give a row the status ``error`` if its verifier raises, and go on to judge the others."""

    def start_row(self, row: RecordedRow) -> Future[Verdict]:
        if row.attempt:
            return self.verdict(*row.attempt)
        verdict: Future[Verdict] = Future()
        verdict.set_result(Verdict(0.0, "error", "", str(row.error), 0.0))
        return verdict

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        try:
            return super().verify(problem, response, truncated)
        except Exception as error:
            return Verdict(0.0, "error", "", f"the verifier raised {type(error).__name__}: {error}"[:1000], 0.0)


def _checked(rows: Sequence[RecordedRow], threads: VerifierThreads) -> list[RecordedRow]:
    """Return the rows, with an error in place of each response whose ground truth cannot be used."""
    faults: dict[tuple[str, str], RowError | None] = {}
    checked: list[RecordedRow] = []
    with threads.borrowed() as verifiers:
        for row in rows:
            if row.attempt:
                problem = row.attempt[0]
                key = problem.ability, problem.ground_truth
                if key not in faults:
                    faults[key] = None
                    try:
                        check_ground_truth(problem, verifiers)
                    except RowError as error:
                        faults[key] = error
                if (fault := faults[key]) is not None:
                    row = replace(row, attempt=None, error=fault.at(row.origin))
            checked.append(row)
    return checked


def _resumed(out: Path, rows: Sequence[RecordedRow]) -> list[Mapping[str, Any]]:
    """Return the rows of ``out``, and cut off an incomplete last line. Raises DataError unless they match ``rows``."""
    if not out.exists():
        return []
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            judged_row = json.loads(line)
            added = {name: judged_row[name] for name in _ADDED}
            same = number <= len(rows) and line.decode() == _as_json({**rows[number - 1].row, **added})
            fits = same and added["status"] in get_args(VerdictStatus)
        except (ValueError, TypeError, KeyError, RecursionError):
            fits = False
        if not fits:
            raise DataError(
                f"{out}:{number}: is no verdict on row {number} of the input; name another --out, or delete it"
            )
        done.append(judged_row)
    if len(whole) < len(content):
        os.truncate(out, len(whole))
    return done


def _as_json(row: Mapping[str, Any]) -> str:
    """Return a row as one line of JSON. Values that JSON lacks, as dates or bytes in Parquet, become text."""
    return json.dumps(row, default=str)


def _count(tally: dict[str, Counter[str]], row: RecordedRow, status: str) -> None:
    tally.setdefault(row.source, Counter())[status] += 1
