"""The two kinds of record of the data build, candidate and exclusion, and the Parquet shards that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from or1_megatron.runtime.files import replaced
from or1_verify.problems.columns import Published
from or1_verify.problems.problem import problem_id
from or1_verify.types import Message, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Published):
    """A problem in the data build: a published data row, with what the steps add to it.

    ``statement`` is the source's text; the steps find duplicates by it. ``notes`` (JSON-able) are further facts, such
    as ``question_type`` or the votes, from the source or from a step.
    """

    id: str
    origin: str
    set_name: str = ""
    """Name of the problem set in the recipe; ``source`` may be the name of a part of this set."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (Message("user", self.content),)

    def problem(self) -> Problem:
        """Return the candidate as the ``Problem`` that verifiers take."""
        return Problem(
            self.id, self.source, self.ability, self.messages, self.ground_truth, self.difficulty, self.origin
        )


def candidate_id(source: str, content: str) -> str:
    """Return the id that a problem will have in training, from its source and the text of the user's message."""
    return problem_id(source, (Message("user", content),))


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A candidate that a step leaves out. ``reason`` is short: reasons are counted. ``evidence`` is JSON-able."""

    candidate: Candidate
    reason: str
    evidence: Mapping[str, Any]


Outcome = Candidate | Exclusion
"""What a step decides about a candidate: it stays (perhaps changed), or is excluded."""

_NAMES = [field.name for field in fields(Candidate)]
_AS_JSON = ("difficulty", "notes", "evidence")
_SCHEMA = pa.schema(
    [
        (name, pa.list_(pa.string()) if name == "solutions" else pa.string())
        for name in (*_NAMES, "reason", "evidence")  # the last two are null unless the candidate is excluded
    ]
)


def write_shard(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes to a zstd Parquet file. A killed process leaves no part of the file."""
    rows = []
    for outcome in outcomes:
        candidate = outcome if isinstance(outcome, Candidate) else outcome.candidate
        row = {name: getattr(candidate, name) for name in _NAMES}
        if isinstance(outcome, Exclusion):
            row |= {"reason": outcome.reason, "evidence": outcome.evidence}
        rows.append(row | {name: json.dumps(row[name], ensure_ascii=False) for name in _AS_JSON if name in row})
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    with replaced(path, "a shard") as aside:
        pq.write_table(table, aside, compression="zstd", row_group_size=4096)


def read_outcomes(shards: Sequence[Path]) -> Iterator[Outcome]:
    """Yield all outcomes in a step's shards, in order."""
    for batch in _batches(shards, _SCHEMA.names, 4096):
        for row in batch.to_pylist():
            reason, evidence = row.pop("reason"), row.pop("evidence")
            yield _candidate(row) if reason is None else Exclusion(_candidate(row), reason, json.loads(evidence))


def read_candidates(shards: Sequence[Path]) -> Iterator[Candidate]:
    """Yield the candidates in a step's shards that were not excluded, in order."""
    for batch in _batches(shards, [*_NAMES, "reason"], 4096):
        yield from map(_candidate, _going_on(batch).drop_columns(["reason"]).to_pylist())


def read_columns(shards: Sequence[Path], names: Sequence[str], batch_rows: int = 8192) -> Iterator[list[list[Any]]]:
    """Yield the named columns of the candidates that were not excluded, in batches: [column][candidate]."""
    for batch in _batches(shards, [*names, "reason"], batch_rows):
        if (rows := _going_on(batch)).num_rows:
            yield [rows.column(name).to_pylist() for name in names]


def count_rows(shards: Sequence[Path]) -> int:
    """Return the number of candidates in a step's shards that were not excluded."""
    return sum(batch.column("reason").null_count for batch in _batches(shards, ["reason"], 65536))


def _batches(shards: Sequence[Path], names: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    for shard in shards:
        with pq.ParquetFile(shard) as file:
            yield from file.iter_batches(batch_size=batch_rows, columns=list(names))


def _going_on(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.is_null(batch.column("reason")))


def _candidate(row: dict[str, Any]) -> Candidate:
    parsed = {"difficulty": json.loads(row["difficulty"]), "notes": json.loads(row["notes"])}
    return Candidate(**{**row, **parsed, "solutions": tuple(row["solutions"])})
