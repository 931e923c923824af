"""Responses in full, token by token, for the rows of a page that show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from or1_megatron.report.page.embedding import packet
from or1_megatron.report.page.rollout_table import RolloutTable
from or1_megatron.report.page.tokens import TokenTexts
from or1_megatron.runtime.rollout_store import open_rollouts

_TEXTS = ("prompt", "response", "ground_truth", "answer", "detail", "finish_reason", "engine", "versions", "seed")
_TOKENS = ("response_token_ids", "log_probs", "log_prob_differences", "entropies")
_BATCH_ROWS = 64


def packets(rows: RolloutTable, chosen: Sequence[int], tokens: TokenTexts | None) -> dict[int, str]:
    """Return for each chosen row a packet of what ``web/response.js`` shows."""
    wanted: dict[int, dict[int, int]] = {}
    for row in chosen:
        wanted.setdefault(int(rows["file"][row]), {})[int(rows["place"][row])] = int(row)
    found = {}
    for index, places in wanted.items():
        for place, record in _records(rows, index, places):
            found[places[place]] = _packed(record, tokens)
    return found


def _records(rows: RolloutTable, file_index: int, places: dict[int, int]) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_rollouts(rows.files[file_index]) as file:
        columns = [name for name in (*_TEXTS, *_TOKENS) if name in file.schema_arrow.names]
        done = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            here = [place for place in places if done <= place < done + batch.num_rows]
            if here:
                taken = batch.take(pa.array([place - done for place in here], pa.int64()))
                yield from zip(here, taken.to_pylist(), strict=True)
            done += batch.num_rows


def _packed(record: dict[str, Any], tokens: TokenTexts | None) -> str:
    header = {name: record.get(name) for name in _TEXTS}
    ids = record.get("response_token_ids") or []
    columns: dict[str, NDArray[Any]] = {}
    if tokens is not None and ids:
        header["response"], columns["units"] = tokens.cut(ids)
    for name, short in (("log_probs", "log_prob"), ("log_prob_differences", "difference"), ("entropies", "entropy")):
        values = record.get(name)
        if values is not None and len(values) == len(ids):
            columns[short] = np.array(values, dtype=np.float32)
    return packet(header, columns)
