"""Reads the responses of runs into one table, a row per response without its text, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from or1_megatron.runtime.rollout_store import SCHEMA, open_rollouts

BATCH_ROWS: Final = 256
"""Number of responses that are read at a time. It is small, since a response may have 32,000 tokens."""
WORDS: Final = ("stage", "problem", "source", "status")
"""Columns with few different values, which are stored as categories."""

_TAKEN = {name: name for name in ("step", "stage", "source", "status", "reward", "advantage", "truncated", "kept")}
_TAKEN |= {"problem_id": "problem", "sample_index": "sample"}
_TIMES = ("started_s", "finished_s")
_LISTS = ("prompt_token_ids", "response_token_ids", "log_probs", "log_prob_differences", "entropies")


def read_table(files: Sequence[Path], notes: list[str]) -> pd.DataFrame:
    """Return a table of a run's rollout files, with a row per response, in the order of steps and groups.

    Columns: step, stage, problem, source, status, sample, reward, advantage, truncated, kept; tokens, prompt_tokens,
    seconds; log_prob, entropy and difference (absolute log_prob_differences), which are means over the response's
    tokens, or nan without values; file (index in ``files``) and place (row in the file) of the response's text.

    A file that cannot be read is left out and named in ``notes``.
    """
    parts = []
    for number, path in enumerate(files):
        try:
            parts.append(_read(path).reset_index(names="place").assign(file=number))
        except (ValueError, OSError, pa.ArrowException) as error:
            notes.append(f"{path.name} is left out: {str(error).splitlines()[0].removeprefix(f'{path}: ')}")
    nothing = _rows(pa.RecordBatch.from_pylist([], schema=SCHEMA)).assign(place=0, file=0)
    return pd.concat(parts or [nothing], ignore_index=True)


def join(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the tables of several runs as one table, with the column ``run`` (index in ``tables``)."""
    whole = pd.concat([table.assign(run=number) for number, table in enumerate(tables)], ignore_index=True)
    return whole.astype(dict.fromkeys(WORDS, "category"))


def _read(path: Path) -> pd.DataFrame:
    wanted = [*_TAKEN, *_TIMES, *_LISTS]
    with open_rollouts(path) as file:
        if missing := [name for name in wanted if name not in file.schema_arrow.names]:
            raise ValueError(f"it lacks {', '.join(missing)}, as a file of another version does")
        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=wanted)
        return pd.concat([_rows(batch) for batch in batches], ignore_index=True)


def _rows(batch: pa.RecordBatch) -> pd.DataFrame:
    rows = batch.select(list(_TAKEN)).to_pandas().rename(columns=_TAKEN)
    started_s, finished_s = (batch[name].to_numpy(zero_copy_only=False) for name in _TIMES)
    return rows.assign(
        tokens=_lengths(batch["response_token_ids"]),
        prompt_tokens=_lengths(batch["prompt_token_ids"]),
        seconds=finished_s - started_s,
        log_prob=_means(batch["log_probs"]),
        difference=_means(batch["log_prob_differences"], absolute=True),
        entropy=_means(batch["entropies"]),
    )


def _lengths(lists: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def _means(lists: pa.Array, absolute: bool = False) -> np.ndarray:
    """Return the mean of each list, or nan for a missing or empty list."""
    lengths = _lengths(lists)
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(owner, weights=np.abs(values) if absolute else values, minlength=len(lengths))
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / lengths
