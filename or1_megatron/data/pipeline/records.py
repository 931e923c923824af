"""The records that flow from step to step, in Parquet shards: candidates, and the exclusions that a ledger lists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full
from or1_verify.problems.problem import problem_id
from or1_verify.types import Message, Problem

SHARD_ROWS = 20_000
SHARD_CHARS = 64 << 20  # tests of code problems can be megabytes
"""Limits of a shard of the first step: bounds the memory, and the work that a killed step repeats."""

_EXCERPT_CHARS = 300


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem on its way through the pipeline.

    ``statement`` is the source's text, by which duplicates are found; the model reads it between ``opening`` and
    ``instructions``.
    ``solutions`` are reference solutions, possibly none: worked text (math) or source code (code). ``notes`` come from
    the source or a step (JSON-able), such as ``question_type`` or the votes.
    """

    id: str
    source: str
    ability: str
    statement: str
    instructions: str
    ground_truth: str
    solutions: tuple[str, ...]
    difficulty: Mapping[str, int]
    notes: Mapping[str, Any]
    origin: str
    opening: str = ""
    set_name: str = ""
    """The recipe's source that it is from; ``source`` may name a part of it."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (Message("user", self.opening + self.statement + self.instructions),)

    def problem(self) -> Problem:
        """Return the problem as verifiers see it."""
        return Problem(
            self.id, self.source, self.ability, self.messages, self.ground_truth, self.difficulty, self.origin
        )


def candidate_id(source: str, content: str) -> str:
    """Return the id that the problem will have in training, from its source and the user's message."""
    return problem_id(source, (Message("user", content),))


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A candidate that is left out: a short ``reason`` to count by, and the evidence for it (JSON-able)."""

    candidate: Candidate
    reason: str
    evidence: Mapping[str, Any]


Outcome = Candidate | Exclusion
"""What a step decides about a candidate."""


CANDIDATE_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "source", "ability", "statement", "instructions", "ground_truth")),
        ("solutions", pa.list_(pa.string())),
        *((name, pa.string()) for name in ("difficulty", "notes", "origin", "opening", "set_name")),  # two as JSON
    ]
)
LEDGER_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("id", "step", "reason", "evidence", "source", "ability", "origin", "statement")]
)


def write_candidates(path: Path, rows: Sequence[Candidate]) -> None:
    columns = {name: [getattr(row, name) for row in rows] for name in CANDIDATE_SCHEMA.names}
    for name in ("difficulty", "notes"):
        columns[name] = ["{}" if not value else _json(value) for value in columns[name]]
    write_table(path, columns, CANDIDATE_SCHEMA)


def read_candidates(path: Path, batch_rows: int = 4096) -> Iterator[list[Candidate]]:
    """Yield batches of a shard, in its order."""
    names = CANDIDATE_SCHEMA.names
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=batch_rows, columns=names):
            columns = [batch.column(name).to_pylist() for name in names]
            rows, ends = zip(*columns[:-3], strict=True), zip(*columns[-3:], strict=True)
            yield [
                Candidate(*texts, tuple(solutions), _parsed(rated), _parsed(notes), *rest)  # type: ignore[call-arg]
                for (*texts, solutions, rated, notes), rest in zip(rows, ends, strict=True)
            ]


def read_column(path: Path, names: Sequence[str], batch_rows: int = 8192) -> Iterator[list[list[Any]]]:
    """Yield the named columns of a shard, in batches: [column][row]."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=batch_rows, columns=list(names)):
            yield [batch.column(name).to_pylist() for name in names]


def write_ledger(path: Path, step: str, exclusions: Sequence[Exclusion]) -> None:
    rows = [exclusion.candidate for exclusion in exclusions]
    columns = {
        "id": [row.id for row in rows],
        "step": [step] * len(rows),
        "reason": [exclusion.reason for exclusion in exclusions],
        "evidence": [_json(exclusion.evidence) for exclusion in exclusions],
        "source": [row.source for row in rows],
        "ability": [row.ability for row in rows],
        "origin": [row.origin for row in rows],
        "statement": [row.statement[:_EXCERPT_CHARS] for row in rows],
    }
    write_table(path, columns, LEDGER_SCHEMA)


def write_table(path: Path, columns: Mapping[str, Sequence[Any]], schema: pa.Schema) -> None:
    """Write a zstd Parquet file, whole or not at all."""
    aside = path.with_name(path.name + PARTIAL_SUFFIX)
    with naming_disk_full(path, "a shard"):
        pq.write_table(pa.table(dict(columns), schema=schema), aside, compression="zstd", row_group_size=4096)
        aside.replace(path)


def rows_in(path: Path) -> int:
    return int(pq.read_metadata(path).num_rows)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _parsed(text: str) -> dict[str, Any]:
    return {} if text == "{}" else json.loads(text)
