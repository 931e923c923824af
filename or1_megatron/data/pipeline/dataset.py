"""Write the dataset: Skywork-OR1-RL-Data's own layout, one Parquet file per ability, as ``or1 train`` loads it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.data.pipeline.records import Candidate, read_candidates
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full
from or1_verify.problems.rows import published_row


def write_dataset(folder: Path, shards: Sequence[Path]) -> dict[str, int]:
    """Write ``folder``/ABILITY.parquet anew, whole or not at all; return the number of problems by ability."""
    rows = (row for shard in shards for batch in read_candidates(shard) for row in batch)
    models = sorted({model for row in rows for model in row.difficulty})
    aside = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(aside, ignore_errors=True)
    with naming_disk_full(folder, "the dataset"):
        aside.mkdir(parents=True)
        counts = _write_files(aside, shards, models)
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)
    return counts


def _write_files(folder: Path, shards: Sequence[Path], models: Sequence[str]) -> dict[str, int]:
    schema = dataset_schema(models)
    writers: dict[str, Any] = {}
    counts: dict[str, int] = {}
    try:
        for shard in shards:
            for rows in read_candidates(shard):
                for ability in sorted({row.ability for row in rows}):
                    own = [row for row in rows if row.ability == ability]
                    first = counts.get(ability, 0)
                    table = [_published(row, index, models) for index, row in enumerate(own, start=first)]
                    if ability not in writers:
                        writers[ability] = pq.ParquetWriter(folder / f"{ability}.parquet", schema, compression="zstd")
                    writers[ability].write_table(pa.Table.from_pylist(table, schema=schema))
                    counts[ability] = first + len(own)
    finally:
        for writer in writers.values():
            writer.close()
    return counts


def dataset_schema(models: Sequence[str]) -> pa.Schema:
    measured = [pa.field("model_difficulty", pa.struct([(model, pa.int64()) for model in models]))] if models else []
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
            ("extra_info", pa.struct([pa.field("index", pa.int64()), *measured])),
        ]
    )


def _published(row: Candidate, index: int, models: Sequence[str]) -> Mapping[str, Any]:
    measured = {model: row.difficulty.get(model) for model in models}
    extra = {"index": index, **({"model_difficulty": measured} if models else {})}
    return published_row(row.source, row.messages, row.ability, row.ground_truth, extra)
