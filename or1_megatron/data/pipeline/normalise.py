"""The first step: sources of any layout become candidates, in shards."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from or1_megatron.data.files import files_of, is_hub_id, read_rows
from or1_megatron.data.layouts import Published, detect_layout, read_published
from or1_megatron.data.pipeline.recipe import BuildSource
from or1_megatron.data.pipeline.records import SHARD_CHARS, SHARD_ROWS, Candidate, candidate_id
from or1_megatron.data.pipeline.steps import Manifest, Say, finish_step, read_manifest, step_key, write_shard
from or1_megatron.data.rows import DataError

NAME = "normalise"
CODE = ("data/pipeline/normalise.py", "data/layouts.py", "data/files.py", "data/rows.py")


def normalise(out: Path, sources: Sequence[BuildSource], say: Say) -> tuple[Manifest, bool]:
    """(what came of the sources, whether that was so already). Raises DataError naming file, row and column."""
    settings = {"sources": [source.model_dump(mode="json") for source in sources]}
    key = step_key(NAME, settings, CODE, [source_digest(source) for source in sources])
    folder = f"steps/00-{NAME}-{key}"
    if (done := read_manifest(out, folder, key)) is not None:
        return done, True
    here = out / folder
    here.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    shard: list[Candidate] = []
    size = count = written = 0
    for source in sources:
        before = count
        for candidate in candidates_of(source):
            shard.append(candidate)
            size += len(candidate.ground_truth) + sum(map(len, (candidate.statement, *candidate.solutions)))
            count += 1
            if len(shard) == SHARD_ROWS or size >= SHARD_CHARS:
                write_shard(here, f"part-{written:05d}.parquet", NAME, shard, ())
                shard, size, written = [], 0, written + 1
        if count == before:
            chosen = f"no row is left after select = {dict(source.select)}" if source.select else "holds no rows"
            raise DataError(f"{source.path}: {chosen}; expected at least one")
        say(f"{NAME}: {source.path}: {count - before} problems")
    if shard:
        write_shard(here, f"part-{written:05d}.parquet", NAME, shard, ())
    return finish_step(out, folder, NAME, key, settings, count, time.perf_counter() - started_s), False


def candidates_of(source: BuildSource) -> Iterator[Candidate]:
    """Raises DataError for a row that is not of the layout."""
    for origin, published in published_rows(source):
        name = _source_name(source, published)
        yield Candidate(
            candidate_id(name, published.statement, published.instructions),
            name,
            published.ability,
            published.statement,
            published.instructions,
            published.ground_truth,
            published.solutions,
            published.difficulty,
            published.notes,
            origin,
        )


def published_rows(source: BuildSource) -> Iterator[tuple[str, Published]]:
    """(origin, row) of the rows that ``select`` and ``limit`` choose."""
    layout, count = source.layout, 0
    for origin, row in read_rows(source.path, source.split, source.subset):
        if count == source.limit:
            return
        if layout == "auto" and isinstance(row, Mapping):  # a source has one layout: its first row's
            layout = detect_layout(row) or "auto"
        if source.select and not _selected(row, source, origin):
            continue
        count += 1
        yield origin, read_published(row, layout, origin)


def _selected(row: Any, source: BuildSource, origin: str) -> bool:
    for column, values in source.select.items():
        if not isinstance(row, Mapping) or column not in row:
            raise DataError(f"{origin}: no column '{column}', by which 'select' chooses; this row has {sorted(row)}")
        if str(row[column]) not in values:
            return False
    return True


def _source_name(source: BuildSource, row: Published) -> str:
    """Skywork's own names stay; others are train-ABILITY-SET or train-ABILITY-SET_SUBSET, as there."""
    set_name = source.name or source.path.stem
    if source.layout == "skywork" or (source.layout == "auto" and row.source.startswith("train-")):
        return row.source
    return f"train-{row.ability}-{set_name}" + (f"_{row.source}" if row.source else "")


def source_digest(source: BuildSource) -> str:
    """Of all its bytes; of a set on the hub its name: a new revision there is not noticed."""
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
