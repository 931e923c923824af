"""Writes and reads the responses of a run: one zstd Parquet file per step, in the background; deletes the oldest.

The loop passes references to frozen records and continues. A thread turns the records into columns, for which Arrow and
zstd release the GIL. Fields: ``schemas.ROLLOUT``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.runtime.files import PARTIAL_SUFFIX, replaced
from or1_megatron.runtime.run_folder import step_name, step_of
from or1_megatron.schemas.fields import ROLLOUT, arrow_schema
from or1_megatron.types import AdvantagedGroup, BoolArray, Completion, Float32Array, Group, TokenScores
from or1_verify.types import Message

SCHEMA = arrow_schema(ROLLOUT)
HELD_OUT = "held-out"  # the column ``stage`` of responses of evaluations

_WAITING_STEPS = 2
"""Number of steps whose rollouts may wait in memory to be written. A further step blocks the loop."""

_REPETITIVE = ["stage", "problem_id", "source", "ability", "ground_truth", "prompt", "prompt_token_ids.list.element"]
"""Columns written with a Parquet dictionary. For other columns the dictionary would take most of the writing time."""

_OF_COMPLETION = (
    "problem_id", "sample_index", "finish_reason", "truncated", "engine", "seed", "started_s", "finished_s",
)  # fmt: skip
_OF_VERDICT = ("reward", "status", "answer", "detail")


class RolloutStore:
    """Writes the rollouts of steps on a thread. An error of the thread is raised by a later ``write`` or ``close``."""

    def __init__(self, folder: Path, keep_bytes: int) -> None:
        """``keep_bytes``: limit for all files together. Older files are deleted first; the newest file always stays."""
        self.folder = folder
        self.keep_bytes = keep_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
            leftover.unlink()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store")
        self._unfinished: deque[Future[None]] = deque()

    def write(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        kept: Sequence[AdvantagedGroup],
        scores: TokenScores | None = None,
    ) -> None:
        """Write a step's groups in the background. The arguments are those of ``to_table``.

        Returns at once unless ``_WAITING_STEPS`` earlier steps still wait for the disk. Raises the error of an earlier
        step's write, such as a DiskFullError that names the file.
        """
        while self._unfinished and (self._unfinished[0].done() or len(self._unfinished) >= _WAITING_STEPS):
            self._unfinished.popleft().result()
        make_table = partial(to_table, step, stage, groups, kept, scores)
        self._unfinished.append(self._writer.submit(self._write_file, step, make_table))

    def wait_written(self) -> None:
        """Block until every ``write`` so far is on disk. Any thread may call this. ``write`` and ``close`` raise the
        errors of the background writes."""
        wait(tuple(self._unfinished))

    def close(self) -> None:
        """Wait until every ``write`` so far is on disk, and end the thread. A second call does nothing."""
        self._writer.shutdown(wait=True)
        while self._unfinished:
            self._unfinished.popleft().result()

    def _write_file(self, step: int, make_table: Callable[[], pa.Table]) -> None:
        table = make_table()
        with replaced(self.folder / f"{step_name(step)}.parquet", f"the rollouts of step {step}") as aside:
            pq.write_table(table, aside, compression="zstd", write_statistics=False, use_dictionary=_REPETITIVE)
        delete_oldest(self.folder, self.keep_bytes)


def to_table(
    step: int,
    stage: str,
    groups: Sequence[Group],
    kept: Sequence[AdvantagedGroup],
    scores: TokenScores | None = None,
) -> pa.Table:
    """Return a table with a row per response, in the order of ``groups``, and the fields of ``schemas.ROLLOUT``.

    Args:
        kept: the groups that were not rejected. They must be objects of ``groups``, else ValueError is raised.
        scores: the policy's scores of the responses of ``kept``, in order; None: unknown. A response whose scores do
            not cover all of its tokens gets null.
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
    columns: dict[str, Any] = {
        "step": np.full(len(rows), step, np.int32),
        "stage": [stage] * len(rows),
        "source": [g.prompt.problem.source for g, _, _, _ in rows],
        "ability": [g.prompt.problem.ability for g, _, _, _ in rows],
        "ground_truth": [g.prompt.problem.ground_truth for g, _, _, _ in rows],
        "prompt": [of_prompt[id(g)] for g, _, _, _ in rows],
        "prompt_token_ids": _lists([g.prompt.token_ids for g, _, _, _ in rows], np.int32),
        "response": [c.text for _, c, _, _ in rows],
        "response_token_ids": _lists([c.token_ids for _, c, _, _ in rows], np.int32),
        "log_probs": _lists([c.log_probs for _, c, _, _ in rows], np.float32),
        "versions": [
            [{"version": span.version, "first_token": span.first_token} for span in c.versions] for _, c, _, _ in rows
        ],
        "verify_wall_s": [v.wall_s for _, _, v, _ in rows],
        "advantage": [advantage for _, _, _, advantage in rows],
        "kept": [id(g) in advantages for g, _, _, _ in rows],
        **{name: [getattr(c, name) for _, c, _, _ in rows] for name in _OF_COMPLETION},
        **{name: [getattr(v, name) for _, _, v, _ in rows] for name in _OF_VERDICT},
        **_scored([(g, c) for g, c, _, _ in rows], kept, scores),
    }
    return pa.table(columns, schema=SCHEMA)


def _scored(
    rows: Sequence[tuple[Group, Completion]], kept: Sequence[AdvantagedGroup], scores: TokenScores | None
) -> dict[str, pa.Array]:
    """Return two float16 columns for the trained tokens: log-prob differences (policy - engine) and entropies."""
    of_row: dict[int, tuple[Float32Array, Float32Array]] = {}
    if scores is not None:
        trained = [completion for one in kept for completion in one.group.completions]
        for completion, log_probs, entropies in zip(trained, scores.log_probs, scores.entropies, strict=True):
            if log_probs.size == completion.log_probs.size:  # the scores cover all of its tokens
                of_row[id(completion)] = log_probs - completion.log_probs, entropies
    missing = np.array([id(completion) not in of_row for _, completion in rows], dtype=np.bool_)
    nothing = np.empty(0, np.float32), np.empty(0, np.float32)
    scored = [of_row.get(id(completion), nothing) for _, completion in rows]
    return {
        "log_prob_differences": _lists([differences for differences, _ in scored], np.float16, missing),
        "entropies": _lists([entropies for _, entropies in scored], np.float16, missing),
    }


def _prompt_text(messages: Sequence[Message]) -> str:
    """Return the prompt as text. Each message begins with its role, unless there is only one message."""
    if len(messages) == 1:
        return messages[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in messages)


def _lists(arrays: Sequence[np.ndarray], dtype: type[np.generic], missing: BoolArray | None = None) -> pa.ListArray:
    """Return arrays [n_0], [n_1], ... as one list column, null where ``missing``."""
    with np.errstate(over="ignore"):  # too large for float16: an infinity
        values = np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
    offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    mask = None if missing is None else pa.array(missing)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=mask)


def delete_oldest(folder: Path, keep_bytes: int) -> None:
    """Delete the files of the earliest steps until the rest fit into ``keep_bytes``. The newest file always stays."""
    files = [(path, path.stat().st_size) for path in rollout_files(folder)]
    total = sum(size for _, size in files)
    for path, size in files[:-1]:
        if total <= keep_bytes:
            break
        path.unlink()
        total -= size


def rollout_files(folder: Path) -> list[Path]:
    """Return the complete rollout files, ordered by step."""
    files = [path for path in folder.glob("step_*.parquet") if step_of(path) is not None]
    return sorted(files, key=lambda path: step_of(path) or 0)


def open_rollouts(path: Path) -> pq.ParquetFile:
    """Open one step's file for reading in parts. Raises FileNotFoundError, or ValueError if it is not Parquet."""
    if not path.is_file():
        raise FileNotFoundError(f"no rollout file {path}")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a rollout file: {error}") from error


def read_rollouts(path: Path, columns: Iterable[str] | None = None) -> pa.Table:
    """Return the rows of one step's file, with all columns or only ``columns``.

    Raises FileNotFoundError, and ValueError if the file is not a rollout file.
    """
    wanted = list(columns) if columns is not None else SCHEMA.names
    with open_rollouts(path) as file:
        there = set(file.schema_arrow.names)
        later = [name for name in wanted if name not in there and SCHEMA.field(name).nullable]
        if missing := [name for name in wanted if name not in there and name not in later]:
            raise ValueError(f"{path}: not a rollout file of this version: it lacks {', '.join(missing)}")
        try:
            table = file.read([name for name in wanted if name in there])
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: not a rollout file: {error}") from error
    for name in later:  # the file is from a version without this field
        table = table.append_column(SCHEMA.field(name), pa.nulls(table.num_rows, SCHEMA.field(name).type))
    return table.select(wanted)
