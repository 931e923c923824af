"""The first step of the data build: reads all sources, in any known column layout, into shards of candidates."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import batched
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.recipe import BuildSource
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome, candidate_id, write_shard
from or1_megatron.data.pipeline.steps import Manifest, Say, finish_step, finished_step, step_folder
from or1_megatron.data.problems import choose_columns, files_of, is_hub_id, read_rows
from or1_verify.problems.columns import Published
from or1_verify.problems.layouts import detect_layout, read_published
from or1_verify.problems.rows import DataError, RowError
from or1_verify.problems.unusable import FILE_NAME, Policy, UnusableRows

NAME = "normalise"
SHARD_ROWS = 2000
"""Candidates per shard. This limits memory (a code problem's tests can be megabytes) and what a killed step repeats."""
UNUSABLE = "unusable_row"
"""The reason that the ledger gives for a data row that this step excludes."""


def normalise(out: Path, sources: Sequence[BuildSource], unusable: Policy, say: Say) -> Manifest:
    """Run the step and return its manifest. Raises DataError if a source cannot be read or rows are refused."""
    settings = {"sources": [source.model_dump(mode="json") for source in sources], "unusable": unusable}
    folder = step_folder(0, NAME, settings, [source_digest(source) for source in sources])
    if (finished := finished_step(out, folder, say)) is not None:
        return finished
    (out / folder).mkdir(parents=True, exist_ok=True)
    started_s, faults = time.perf_counter(), UnusableRows()
    outcomes = (outcome for source in sources for outcome in _outcomes(source, faults, say))
    for number, shard in enumerate(batched(outcomes, SHARD_ROWS)):
        write_shard(out / folder / f"part-{number:05d}.parquet", shard)
    faults.settle(unusable, out / FILE_NAME, "unusable=drop")
    return finish_step(out, folder, NAME, started_s, say)


def _outcomes(source: BuildSource, faults: UnusableRows, say: Say) -> Iterator[Outcome]:
    """Yield a source's candidates, and exclusions of its unusable rows. Raises DataError if no row is selected."""
    count, name = 0, _set_name(source)
    for origin, row in published_rows(source):
        count += 1
        if isinstance(row, RowError):
            faults.add(row)
            empty = Candidate("", "", "", name, id=candidate_id(name, origin), origin=origin)
            yield Exclusion(empty, UNUSABLE, {"reason": row.reason, "message": str(row)})
        else:
            yield _candidate(source, origin, row)
    if not count:
        chosen = f"no row is left after select = {dict(source.select)}" if source.select else "holds no rows"
        raise DataError(f"{source.path}: {chosen}; expected at least one")
    say(f"{NAME}: {source.path}: {count} problems")


def _candidate(source: BuildSource, origin: str, row: Published) -> Candidate:
    name = _source_name(source, row)
    columns = {field.name: getattr(row, field.name) for field in fields(row)} | {"source": name}
    return Candidate(**columns, id=candidate_id(name, row.content), origin=origin, set_name=_set_name(source))


def published_rows(source: BuildSource) -> Iterator[tuple[str, Published | RowError]]:
    """Yield (origin, row) of a source's rows that ``select`` chooses; RowError instead of a row that cannot be read."""
    layout = "auto"
    for origin, row in read_rows(source.path, source.split, source.subset):
        try:
            if source.select and not _selected(row, source, origin):
                continue
            columns = choose_columns(row, source.columns, origin) if source.columns else row
            if layout == "auto" and isinstance(columns, Mapping):  # the first data row decides the source's layout
                layout = detect_layout(columns) or "auto"
            published: Published | RowError = read_published(columns, layout, origin)
        except RowError as error:
            published = error
        yield origin, published


def _selected(row: Any, source: BuildSource, origin: str) -> bool:
    if not isinstance(row, Mapping):
        return True  # read_published refuses it
    for column, values in source.select.items():
        if column not in row:
            detail = f"no column '{column}', by which 'select' chooses; this row has {sorted(row)}"
            raise RowError(origin, f"no column '{column}'", detail)
        if str(row[column]) not in values:
            return False
    return True


def _set_name(source: BuildSource) -> str:
    return source.name or source.path.stem


def _source_name(source: BuildSource, row: Published) -> str:
    """Return Skywork's own source name if the row has one, else train-ABILITY-SET or train-ABILITY-SET_SUBSET."""
    set_name = _set_name(source)
    if row.source.startswith("train-"):
        return row.source
    return f"train-{row.ability}-{set_name}" + (f"_{row.source}" if row.source else "")


def source_digest(source: BuildSource) -> str:
    """Return a hash of all bytes of a source. For a set on the hub, return its id: new revisions go unnoticed."""
    if is_hub_id(source.path):
        return f"hub:{source.path}"
    digest = hashlib.sha256()
    for path in files_of(source.path, source.split) if source.path.is_dir() else [source.path]:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); expected a file of problems") from None
    return digest.hexdigest()
