"""The responses of runs without their texts, as one table of columns, read file by file in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from or1_megatron.runtime.rollout_store import open_rollouts
from or1_megatron.runtime.run_folder import step_of

_BATCH_ROWS = 256
"""Rows read at a time; a response may have 32,000 tokens."""

_NEEDED = ("problem_id", "sample_index", "reward")
_LISTS = ("prompt_token_ids", "response_token_ids", "log_probs", "log_prob_differences", "entropies")
_WORDS = ("stage", "problem", "source", "status")
_FIELDS = {"problem": "problem_id"}
_NUMBERS = ("sample_index", "reward", "advantage", "started_s", "finished_s", "truncated", "kept")

Column = NDArray[Any]


@dataclass(frozen=True)
class RolloutTable:
    """Columns [n] of responses in the order of their steps and groups; nan or "" where a file lacks a column."""

    files: Sequence[Path]
    columns: Mapping[str, Column]
    """step, sample, reward, advantage, tokens, prompt_tokens, seconds, log_prob, difference (mean of |.|), entropy,
    truncated, kept; stage, problem, source and status as places in ``words``; and where the text of a row is: ``file``
    (place in ``files``) and ``place`` (row of the file)."""
    words: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def part(self, rows: NDArray[np.int64]) -> dict[str, Column]:
        """Return the columns of these rows."""
        return {name: values[rows] for name, values in self.columns.items()}

    def stages(self) -> list[tuple[int, str, NDArray[np.bool_]]]:
        """Return (first step, name, which rows [n]) of each stage, in the order of steps."""
        codes, first = np.unique(self["stage"], return_index=True)
        found = sorted((int(self["step"][place]), int(code)) for code, place in zip(codes, first, strict=True))
        return [(step, self.words["stage"][code], self["stage"] == code) for step, code in found]

    def groups(self) -> NDArray[np.int64]:
        """Return [n] the number of each row's group: neighbours of one step and problem with rising sample indices."""
        step, problem, sample = self["step"], self["problem"], self["sample"]
        begins = (step[1:] != step[:-1]) | (problem[1:] != problem[:-1]) | (sample[1:] <= sample[:-1])
        return np.concatenate([[0], np.cumsum(begins)]).astype(np.int64)[: len(self)]


def gather(files: Sequence[Path], notes: list[str]) -> RolloutTable:
    """Return the rows of these files. A file that cannot be read is left out and named in ``notes``."""
    parts: list[dict[str, Column]] = []
    lacking: dict[str, int] = {}
    words: dict[str, dict[str, int]] = {name: {} for name in _WORDS}
    for index, path in enumerate(files):
        try:
            parts += _read(path, index, lacking, words)
        except (ValueError, OSError, pa.ArrowException) as error:
            notes.append(f"{path.name} is left out: {str(error).splitlines()[0].removeprefix(f'{path}: ')}")
    for name, count in lacking.items():
        notes.append(f"{count} of {len(files)} rollout files lack '{name}', as those of older versions do")
    if not parts:
        nothing = pa.RecordBatch.from_pylist([], schema=pa.schema([]))
        parts.append(_columns(nothing, 0, 0, 0, {name: {} for name in _WORDS}))
    return RolloutTable(files, _concatenated(parts), {name: list(codes) for name, codes in words.items()})


def join(tables: Sequence[RolloutTable]) -> RolloutTable:
    """Return the tables of several runs as one, with columns ``run`` (place in ``tables``) and ``row`` (of the run)."""
    known: dict[str, dict[str, int]] = {name: {} for name in _WORDS}
    parts: list[dict[str, Column]] = []
    for number, table in enumerate(tables):
        columns = {**table.columns, "run": np.full(len(table), number, np.int32), "row": np.arange(len(table))}
        for name, codes in known.items():
            shared = np.array([codes.setdefault(word, len(codes)) for word in table.words[name]], np.int32)
            columns[name] = shared[columns[name]]
        parts.append(columns)
    return RolloutTable((), _concatenated(parts), {name: list(codes) for name, codes in known.items()})


def _concatenated(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read(path: Path, index: int, lacking: dict[str, int], words: dict[str, dict[str, int]]) -> list[dict[str, Column]]:
    """Return all rows of a file, or raise: a file is taken whole or not at all."""
    with open_rollouts(path) as file:
        there = set(file.schema_arrow.names)
        if missing := [name for name in _NEEDED if name not in there]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        fields = [_FIELDS.get(name, name) for name in _WORDS]
        wanted = [name for name in (*fields, *_NUMBERS, *_LISTS) if name in there]
        parts: list[dict[str, Column]] = []
        done = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
            if batch.num_rows:
                parts.append(_columns(batch, index, step_of(path) or 0, done, words))
                done += batch.num_rows
    for name in (*fields, *_NUMBERS, "response_token_ids", "log_probs"):
        if name not in there:
            lacking[name] = lacking.get(name, 0) + 1
    return parts


def _columns(
    batch: pa.RecordBatch, file: int, step: int, done: int, words: dict[str, dict[str, int]]
) -> dict[str, Column]:
    """Return the columns of a batch that begins at row ``done`` of the file; ``words`` learns new words."""
    rows = batch.num_rows
    there = set(batch.schema.names)

    def numbers(name: str) -> Column:
        if name not in there:
            return np.full(rows, np.nan, np.float32)
        kind = pa.float64() if name.endswith("_s") else pa.float32()
        return batch[name].cast(kind).to_numpy(zero_copy_only=False)

    def codes(name: str) -> Column:
        field = _FIELDS.get(name, name)
        if field not in there:
            return np.full(rows, words[name].setdefault("", len(words[name])), np.int32)
        encoded = batch[field].cast(pa.string()).fill_null("").dictionary_encode()
        known = words[name]
        of_batch = np.array([known.setdefault(word, len(known)) for word in encoded.dictionary.to_pylist()], np.int32)
        return of_batch[encoded.indices.to_numpy()]

    def lists(name: str) -> pa.Array:
        return batch[name] if name in there else pa.nulls(rows, pa.list_(pa.float32()))

    return {
        "file": np.full(rows, file, np.int32),
        "place": np.arange(done, done + rows, dtype=np.int32),
        "step": np.full(rows, step, np.int32),
        "stage": codes("stage"),
        "problem": codes("problem"),
        "source": codes("source"),
        "status": codes("status"),
        "sample": np.nan_to_num(numbers("sample_index")).astype(np.int32),
        "reward": numbers("reward"),
        "advantage": numbers("advantage"),
        "truncated": numbers("truncated") == 1,
        "kept": numbers("kept") == 1,
        "tokens": _lengths(lists("response_token_ids")),
        "prompt_tokens": _lengths(lists("prompt_token_ids")),
        "seconds": (numbers("finished_s") - numbers("started_s")).astype(np.float32),
        "log_prob": _means(lists("log_probs")),
        "difference": _means(lists("log_prob_differences"), absolute=True),
        "entropy": _means(lists("entropies")),
    }


def _lengths(lists: pa.Array) -> Column:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int32)


def _means(lists: pa.Array, absolute: bool = False) -> Column:
    """Return the mean of each list; nan for a missing or empty one."""
    lengths = _lengths(lists)
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(owner, weights=np.abs(values) if absolute else values, minlength=len(lengths))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums / lengths).astype(np.float32)
