"""A run's responses on disk: one zstd Parquet file per step, written in the background, the oldest deleted.

Records are frozen, so the loop hands over references and goes on; a thread turns them into columns (Arrow and zstd
release the GIL). Fields: ``schemas.ROLLOUT``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full
from or1_megatron.runtime.run_folder import step_name, step_of
from or1_megatron.schemas import ROLLOUT, arrow_schema
from or1_megatron.types import AdvantagedGroup, Group, Message

SCHEMA = arrow_schema(ROLLOUT)

_WAITING_STEPS = 2
"""Steps that may wait for the disk before the loop waits too: bounds the memory that they hold."""

_REPETITIVE = ["stage", "problem_id", "source", "ability", "ground_truth", "prompt", "prompt_token_ids.list.element"]
"""Columns worth a Parquet dictionary; for the others, looking for repetition takes most of the writing time."""


class RolloutStore:
    """Writes steps. A failure of the writing thread is raised by a later ``write``, or by ``flush`` or ``close``."""

    def __init__(self, folder: Path, keep_bytes: int) -> None:
        """``keep_bytes``: the oldest files go while all together are larger; the newest stays whatever its size."""
        self.folder = folder
        self.keep_bytes = keep_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
            leftover.unlink()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store")
        self._unfinished: deque[Future[None]] = deque()

    def write(self, step: int, stage: str, groups: Sequence[Group], kept: Sequence[AdvantagedGroup]) -> None:
        """Record a step's groups; ``kept`` are those (the very same objects) that were not rejected.

        Returns at once unless earlier steps still wait for the disk. Raises the failure of an earlier step:
        DiskFullError naming its file.
        """
        while self._unfinished and (self._unfinished[0].done() or len(self._unfinished) >= _WAITING_STEPS):
            self._unfinished.popleft().result()
        self._unfinished.append(self._writer.submit(self._write_file, step, stage, groups, kept))

    def flush(self) -> None:
        """Block until everything handed over is on disk."""
        while self._unfinished:
            self._unfinished.popleft().result()

    def wait_written(self) -> None:
        """``flush`` for any other thread: failures are left to whoever writes."""
        wait(tuple(self._unfinished))

    def close(self) -> None:
        """Flush and end the thread; again does nothing."""
        self._writer.shutdown(wait=True)
        self.flush()

    def _write_file(self, step: int, stage: str, groups: Sequence[Group], kept: Sequence[AdvantagedGroup]) -> None:
        path = self.folder / f"{step_name(step)}.parquet"
        aside = path.with_name(path.name + PARTIAL_SUFFIX)
        table = to_table(step, stage, groups, kept)
        with naming_disk_full(path, f"the rollouts of step {step}"):
            try:
                pq.write_table(table, aside, compression="zstd", write_statistics=False, use_dictionary=_REPETITIVE)
                os.replace(aside, path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise
        delete_oldest(self.folder, self.keep_bytes)


def to_table(step: int, stage: str, groups: Sequence[Group], kept: Sequence[AdvantagedGroup]) -> pa.Table:
    """One row per response, groups in their order, with the fields of ``schemas.ROLLOUT``.

    Raises ValueError when a kept group is none of ``groups``.
    """
    advantages = {id(one.group): one.advantages for one in kept}  # the same problem may occur twice in a step
    if not advantages.keys() <= {id(group) for group in groups}:
        raise ValueError(f"rollouts of step {step}: a kept group is not among the step's groups")
    rows = [
        (group, completion, verdict, float(advantages[id(group)][i]) if id(group) in advantages else 0.0)
        for group in groups
        for i, (completion, verdict) in enumerate(zip(group.completions, group.verdicts, strict=True))
    ]
    of_prompt = {id(group): _prompt_text(group.prompt.problem.messages) for group in groups}
    spans = [span for _, c, _, _ in rows for span in c.versions]
    columns: dict[str, Any] = {
        "step": np.full(len(rows), step, np.int32),
        "stage": [stage] * len(rows),
        "problem_id": [c.problem_id for _, c, _, _ in rows],
        "sample_index": [c.sample_index for _, c, _, _ in rows],
        "source": [g.prompt.problem.source for g, _, _, _ in rows],
        "ability": [g.prompt.problem.ability for g, _, _, _ in rows],
        "ground_truth": [g.prompt.problem.ground_truth for g, _, _, _ in rows],
        "prompt": [of_prompt[id(g)] for g, _, _, _ in rows],
        "prompt_token_ids": _lists([g.prompt.token_ids for g, _, _, _ in rows], np.int32),
        "response": [c.text for _, c, _, _ in rows],
        "response_token_ids": _lists([c.token_ids for _, c, _, _ in rows], np.int32),
        "log_probs": _lists([c.log_probs for _, c, _, _ in rows], np.float32),
        "finish_reason": [c.finish_reason for _, c, _, _ in rows],
        "truncated": [c.truncated for _, c, _, _ in rows],
        "versions": pa.ListArray.from_arrays(
            _offsets([len(c.versions) for _, c, _, _ in rows]),
            pa.StructArray.from_arrays(
                [
                    pa.array([span.version for span in spans], pa.int32()),
                    pa.array([span.first_token for span in spans], pa.int32()),
                ],
                names=["version", "first_token"],
            ),
        ),
        "engine": [c.engine for _, c, _, _ in rows],
        "seed": [c.seed for _, c, _, _ in rows],
        "started_s": [c.started_s for _, c, _, _ in rows],
        "finished_s": [c.finished_s for _, c, _, _ in rows],
        "reward": [v.reward for _, _, v, _ in rows],
        "status": [v.status for _, _, v, _ in rows],
        "answer": [v.answer for _, _, v, _ in rows],
        "detail": [v.detail for _, _, v, _ in rows],
        "verify_wall_s": [v.wall_s for _, _, v, _ in rows],
        "advantage": [advantage for _, _, _, advantage in rows],
        "kept": [id(g) in advantages for g, _, _, _ in rows],
    }
    return pa.table(columns, schema=SCHEMA)


def _prompt_text(messages: Sequence[Message]) -> str:
    """A lone user turn as it is; of several turns each with its role before it."""
    if len(messages) == 1:
        return messages[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in messages)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))


def _lists(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.ListArray:
    """[n_0], [n_1], ... as one list column, copied once."""
    values = np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), pa.array(values))


def delete_oldest(folder: Path, keep_bytes: int) -> None:
    """Delete the files of the earliest steps until the rest fit into ``keep_bytes``; the newest always stays."""
    files = [(path, path.stat().st_size) for path in rollout_files(folder)]
    total = sum(size for _, size in files)
    for path, size in files[:-1]:
        if total <= keep_bytes:
            break
        path.unlink()
        total -= size


def rollout_files(folder: Path) -> list[Path]:
    """The complete rollout files, by step."""
    files = [path for path in folder.glob("step_*.parquet") if step_of(path) is not None]
    return sorted(files, key=lambda path: step_of(path) or 0)


def read_rollouts(path: Path, columns: Iterable[str] | None = None) -> pa.Table:
    """The rows of one step's file, all columns or only these.

    Raises FileNotFoundError, and ValueError naming the file when it is not a rollout file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no rollout file {path}")
    try:
        table = pq.read_table(path, columns=list(columns) if columns is not None else None)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a rollout file: {error}") from error
    wanted = list(columns) if columns is not None else SCHEMA.names
    if missing := [name for name in wanted if name not in table.column_names]:
        raise ValueError(f"{path}: not a rollout file of this version: it lacks {', '.join(missing)}")
    return table
