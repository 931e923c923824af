"""A step of the build, and how it runs: shard by shard, each shard's result on disk before the next begins."""

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
    """Base of the steps. ``prepare`` sees the whole input once; ``apply`` then decides shard by shard, in order."""

    name: str
    without_effect: frozenset[str] = frozenset()
    """Keys of the configuration on which the result does not depend."""

    def __init__(self, config: C) -> None:
        self._config = config

    def settings(self) -> Mapping[str, Any]:
        """Return the settings that the result depends on, JSON-able."""
        return self._config.model_dump(mode="json", exclude=set(self.without_effect))

    def prepare(self, shards: Sequence[Path]) -> None:
        """Read the whole input, if the step needs it."""

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        """Return an outcome for each row; ``first`` is the number of the first row within the whole input."""
        return [self.decide(row, number) for number, row in enumerate(rows, start=first)]

    def decide(self, row: Candidate, number: int) -> Outcome:
        """Return the outcome of the row with this number, where it does not depend on the other rows of the shard."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what ``prepare`` has made."""


@dataclass(frozen=True)
class Manifest:
    """The record of a finished step, written last: a step without a manifest is not finished."""

    step: str
    folder: str
    """``steps/NN-NAME-KEY``; the key is a hash of all that the result depends on."""
    rows_in: int
    rows_out: int
    reasons: Mapping[str, int]
    sources: Mapping[str, int]
    """Rows that the step kept, by ``source``."""
    shards: Mapping[str, int]
    """File name to bytes."""
    seconds: float

    def paths(self, out: Path) -> list[Path]:
        return [out / self.folder / name for name in self.shards]


def step_folder(number: int, name: str, settings: Mapping[str, Any], before: Any) -> str:
    """Return the folder of a step's result. ``before``: the folder of the step before, or digests of the sources."""
    text = json.dumps([name, settings, _code_digests(), before], sort_keys=True)
    return f"steps/{number:02d}-{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@functools.cache
def _code_digests() -> tuple[str, ...]:
    return tuple(digest_of_code(_PACKAGES / package) for package in ("or1_megatron/data", "or1_verify"))


def finished_step(out: Path, folder: str, say: Say) -> Manifest | None:
    """Return the manifest of a finished step whose files are all there in their full size; else None."""
    try:
        manifest = Manifest(**json.loads((out / folder / MANIFEST).read_text()))
        whole = all(path.stat().st_size == manifest.shards[path.name] for path in manifest.paths(out))
    except (OSError, ValueError, TypeError):
        return None
    if whole:
        _report(manifest, "cached", say)
    return manifest if whole else None


def run_step(out: Path, number: int, step: PipelineStep[Any], before: Manifest, say: Say) -> Manifest:
    """Run a step on the rows that the step before kept; a killed step resumes after its last finished shard."""
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
    """Return the rows of a shard's result; -1 where it is missing or torn."""
    try:
        return int(pq.read_metadata(shard).num_rows)
    except (OSError, pa.ArrowException):
        return -1


def finish_step(out: Path, folder: str, name: str, started_s: float, say: Say) -> Manifest:
    """Count the rows on disk and write the manifest."""
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
    """Raise DataError when the step has kept no row."""
    if manifest.rows_out == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(manifest.reasons.items())) or "none"
        raise DataError(
            f"step '{manifest.step}' leaves none of {manifest.rows_in} problems (excluded: {reasons}); its ledger is "
            f"in {manifest.folder}: see or1 data why, then loosen the step or give other sources"
        )
