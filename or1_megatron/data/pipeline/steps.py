"""The base class of the data build's steps, and the code that runs a step shard by shard and resumes it."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.config.schema import Section
from or1_megatron.data.pipeline.records import (
    Candidate,
    Outcome,
    count_rows,
    read_candidates,
    write_shard,
)
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.versions import digest_of_code
from or1_verify.problems.rows import DataError

MANIFEST = "manifest.json"
_PACKAGES = Path(__file__).resolve().parents[3]

Say = Callable[[str], None]


class PipelineStep[C: Section]:
    """Base of the data build's steps: ``prepare`` sees the whole input, then ``apply`` decides shard by shard."""

    name: str
    without_effect: frozenset[str] = frozenset()
    """Keys of the step's configuration on which its result does not depend."""

    def __init__(self, config: C) -> None:
        self._config = config

    def settings(self) -> Mapping[str, Any]:
        """Return the settings that the step's result depends on, JSON-able."""
        return self._config.model_dump(mode="json", exclude=set(self.without_effect))

    def prepare(self, shards: Sequence[Path]) -> None:
        """Read the whole input, if the step needs it."""

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        """Return an outcome for each candidate of a shard. ``first``: the number of ``rows[0]`` in the whole input."""
        return [self.decide(row, number) for number, row in enumerate(rows, start=first)]

    def decide(self, row: Candidate, number: int) -> Outcome:
        """Return the outcome of one candidate. ``number``: its number in the whole input."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what ``prepare`` has opened."""


@dataclass(frozen=True)
class Manifest:
    """The record of a finished step. It is written last, so a step without a manifest is not finished."""

    step: str
    folder: str
    """The step's folder ``steps/NN-NAME-KEY``, where KEY is a hash of all that the result depends on."""
    rows_in: int
    rows_out: int
    reasons: Mapping[str, int]
    sources: Mapping[str, int]
    """Number of candidates that the step kept, by ``source``."""
    shards: Mapping[str, int]
    """Size in bytes of each shard, by file name."""
    seconds: float

    def paths(self, out: Path) -> list[Path]:
        return [out / self.folder / name for name in self.shards]


def step_folder(number: int, name: str, settings: Mapping[str, Any], before: Any) -> str:
    """Return the folder of a step's result. ``before``: the previous step's folder, or the sources' digests."""
    text = json.dumps([name, settings, _code_digests(), before], sort_keys=True)
    return f"steps/{number:02d}-{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@functools.cache
def _code_digests() -> tuple[str, ...]:
    return tuple(digest_of_code(_PACKAGES / package) for package in ("or1_megatron/data", "or1_verify"))


def finished_step(out: Path, folder: str, say: Say) -> Manifest | None:
    """Return the manifest of a finished step, if all its shards are there in full size; else None."""
    try:
        manifest = Manifest(**json.loads((out / folder / MANIFEST).read_text()))
        whole = all(path.stat().st_size == manifest.shards[path.name] for path in manifest.paths(out))
    except (OSError, ValueError, TypeError):
        return None
    if whole:
        _report(manifest, "cached", say)
    return manifest if whole else None


def run_step(out: Path, number: int, step: PipelineStep[Any], before: Manifest, say: Say) -> Manifest:
    """Run a step on the candidates that the previous step kept. A killed step resumes after its last finished shard."""
    folder = step_folder(number, step.name, step.settings(), before.folder)
    if (finished := finished_step(out, folder, say)) is not None:
        return finished
    (out / folder).mkdir(parents=True, exist_ok=True)
    shards, started_s = before.paths(out), time.perf_counter()
    waiting, first = [], 0
    for shard in shards:
        rows = count_rows([shard])
        if _rows_written(out / folder / shard.name) != rows:
            waiting.append((shard, first))
        first += rows
    if len(waiting) < len(shards):
        say(f"{step.name}: {len(shards) - len(waiting)} of {len(shards)} shards are done already")
    try:
        if waiting:
            step.prepare(shards)
        for shard, number_of_first in waiting:
            outcomes = step.apply(list(read_candidates([shard])), number_of_first)
            write_shard(out / folder / shard.name, outcomes)
            say(f"{step.name}: {shard.name}")
    finally:
        step.close()
    return finish_step(out, folder, step.name, started_s, say)


def _rows_written(shard: Path) -> int:
    """Return the number of outcomes in a shard; -1 if the file is missing or incomplete."""
    try:
        return int(pq.read_metadata(shard).num_rows)
    except (OSError, pa.ArrowException):
        return -1


def finish_step(out: Path, folder: str, name: str, started_s: float, say: Say) -> Manifest:
    """Count the outcomes in a step's shards, and write and return the step's manifest."""
    paths = sorted((out / folder).glob("*.parquet"))
    reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for path in paths:
        for row in pq.read_table(path, columns=["source", "reason"]).to_pylist():
            if row["reason"] is None:
                sources[row["source"]] += 1
            else:
                reasons[row["reason"]] += 1
    kept, sizes = sources.total(), {path.name: path.stat().st_size for path in paths}
    seconds = time.perf_counter() - started_s
    manifest = Manifest(name, folder, kept + reasons.total(), kept, dict(reasons), dict(sources), sizes, seconds)
    write_atomically(out / folder / MANIFEST, json.dumps(asdict(manifest), indent=1).encode(), "a step's manifest")
    _report(manifest, f"{seconds:.1f} s", say)
    return manifest


def _report(manifest: Manifest, how: str, say: Say) -> None:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(manifest.reasons.items()))
    say(f"{manifest.step}: {manifest.rows_in} -> {manifest.rows_out} ({how}){': ' + reasons if reasons else ''}")


def refuse_empty(manifest: Manifest) -> None:
    """Raise DataError if a step has kept no candidate."""
    if manifest.rows_out == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(manifest.reasons.items())) or "none"
        raise DataError(
            f"step '{manifest.step}' leaves none of {manifest.rows_in} problems (excluded: {reasons}); its ledger is "
            f"in {manifest.folder}: see or1 data why, then loosen the step or give other sources"
        )
