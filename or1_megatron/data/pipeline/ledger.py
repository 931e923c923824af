"""Why a problem is not in the dataset, or that it is: what the steps have written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.build import manifests
from or1_megatron.data.pipeline.records import LEDGER_SCHEMA, Candidate, read_candidates, read_column
from or1_verify.problems.rows import DataError


@dataclass(frozen=True)
class ExcludedProblem:
    """A row of the ledger."""

    id: str
    step: str
    reason: str
    evidence: dict[str, Any]
    source: str
    ability: str
    origin: str
    statement: str


def entries(out: Path) -> Iterator[ExcludedProblem]:
    """Yield the whole ledger, in the order of the steps and of the rows."""
    names = LEDGER_SCHEMA.names
    for manifest in manifests(out):
        for shard in manifest.ledger_shards(out):
            for columns in read_column(shard, names):
                for values in zip(*columns, strict=True):
                    row = dict(zip(names, values, strict=True))
                    yield ExcludedProblem(**{**row, "evidence": json.loads(row["evidence"])})


def kept(out: Path) -> Iterator[Candidate]:
    """Yield what the newest build kept."""
    for shard in manifests(out)[-1].candidate_shards(out):
        for rows in read_candidates(shard):
            yield from rows


def why(out: Path, wanted: str) -> list[ExcludedProblem | Candidate]:
    """Return all that is known of a problem: by id (its first digits will do) or by origin, as in file.jsonl:12.

    One id can have several entries: an exact duplicate of the same source has the id of what it repeats.
    Raises DataError when there is no such problem, or the digits are those of several.
    """
    every: Iterator[ExcludedProblem | Candidate] = chain(kept(out), entries(out))
    found = [row for row in every if row.id.startswith(wanted) or f"/{row.origin}".endswith(f"/{wanted}")]
    if not found:
        raise DataError(
            f"{wanted}: no such problem in {out}; expected a problem's id (16 hex digits, or the first of them) "
            "or where it came from, such as train.jsonl:12"
        )
    ids = {row.id for row in found}
    if len(ids) > 1:
        raise DataError(f"{wanted}: {len(ids)} problems are meant, such as {', '.join(sorted(ids)[:4])}; name one")
    return found
