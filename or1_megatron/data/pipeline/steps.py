"""A step of the build, and how it runs: shard by shard, each shard's result on disk before the next begins."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from or1_megatron.config.schema import Section
from or1_megatron.data.pipeline.recipe import AnswersConfig, CodeConfig
from or1_megatron.data.pipeline.records import (
    Candidate,
    Exclusion,
    Outcome,
    read_candidates,
    read_column,
    rows_in,
    write_candidates,
    write_ledger,
)
from or1_megatron.runtime.files import write_atomically
from or1_verify.problems.rows import DataError
from or1_verify.types import Verifier
from or1_verify.verifier_threads import VerifierThreads

MANIFEST = "manifest.json"
PACKAGE = Path(__file__).resolve().parents[2]

V = TypeVar("V", bound=AnswersConfig | CodeConfig)

Say = Callable[[str], None]

MakeVerifiers = Callable[[float, frozenset[str]], Mapping[str, Verifier]]
"""(limit of one verdict in seconds, abilities) to a verifier for each; raises where one cannot be had."""


class PipelineStep[C: Section]:
    """Base of the steps. ``prepare`` sees the whole input once; ``apply`` then decides shard by shard, in order."""

    name: str
    code: tuple[str, ...]
    """Files and folders of this package, relative to it, whose change makes an earlier result invalid."""
    without_effect: frozenset[str] = frozenset()
    """Keys of the configuration on which the result does not depend."""

    def __init__(self, config: C) -> None:
        self._config = config

    def settings(self) -> Mapping[str, Any]:
        """Return what else the result depends on, as JSON-able values."""
        return self._config.model_dump(mode="json", exclude=set(self.without_effect))

    def prepare(self, shards: Sequence[Path]) -> None:
        """Read the whole input, if the step needs it."""

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        """Return an outcome for each row; ``first`` is the number of the first among all rows of the input."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what ``prepare`` has made."""


class VerifierStep(PipelineStep[V]):
    """Base of the steps that judge the candidates of one ability with a verifier; others pass.

    Without a candidate of that ability no verifier is made, and so no sandbox is needed.
    """

    without_effect = frozenset({"workers"})
    ability: str
    verifiers: VerifierThreads

    def __init__(self, config: V, make: MakeVerifiers) -> None:
        super().__init__(config)
        self._make = make

    def prepare(self, shards: Sequence[Path]) -> None:
        make = partial(self._make, self._config.timeout_s, frozenset({self.ability}))
        self.verifiers = VerifierThreads(make, self._config.workers)

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        outcomes = [self.check(row) if row.ability == self.ability else row for row in rows]
        to_judge = [
            (place, row)
            for place, row in enumerate(outcomes)
            if isinstance(row, Candidate) and row.ability == self.ability and row.solutions
        ]
        for place, excluded in self.judge(to_judge):
            outcomes[place] = excluded
        return outcomes

    def check(self, row: Candidate) -> Outcome:
        """Exclude a candidate whose ground truth cannot be used, or that lacks a solution where one is required."""
        raise NotImplementedError

    def judge(self, rows: Sequence[tuple[int, Candidate]]) -> Iterator[tuple[int, Exclusion]]:
        """Yield the place of each candidate to exclude by its solutions, and the exclusion."""
        raise NotImplementedError

    def close(self) -> None:
        if hasattr(self, "verifiers"):
            self.verifiers.close()


@dataclass(frozen=True)
class Manifest:
    """The result of a finished step; written last, so a step without it is not finished."""

    step: str
    key: str
    settings: Mapping[str, Any]
    rows_in: int
    rows_out: int
    reasons: Mapping[str, int]
    sources: Mapping[str, int]
    """Rows that went on, by ``source``."""
    shards: Mapping[str, int]
    """File name to bytes, of candidates and ledgers."""
    digest: str
    """SHA-256 of the candidates that went on: the next step's input."""
    seconds: float = 0.0
    folder: str = field(default="", compare=False)

    def candidate_shards(self, out: Path) -> list[Path]:
        return [out / self.folder / name for name in self.shards if name.startswith("part-")]

    def ledger_shards(self, out: Path) -> list[Path]:
        return [out / self.folder / name for name in self.shards if name.startswith("ledger-")]


@dataclass(frozen=True)
class Done:
    """A step of a build. ``cached``: its result was there before."""

    manifest: Manifest
    cached: bool


def step_key(name: str, settings: Mapping[str, Any], code: Sequence[str], inputs: Any) -> str:
    """Return the cache key: a hash of the step's name, settings, code and input."""
    shared = ("data/pipeline/records.py", "data/pipeline/steps.py")
    text = json.dumps([name, settings, _code_digest((*code, *shared)), inputs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_digest(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in sorted(parts):
        path = (PACKAGE.parent if part.startswith("or1_verify") else PACKAGE) / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(PACKAGE.parent)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def read_manifest(out: Path, folder: str, key: str) -> Manifest | None:
    """Return the manifest of a finished step whose files are all there in their full size; else None."""
    try:
        stored = json.loads((out / folder / MANIFEST).read_text())
        manifest = Manifest(**{**stored, "folder": folder})
        whole = all((out / folder / name).stat().st_size == size for name, size in manifest.shards.items())
    except (OSError, ValueError, TypeError):
        return None
    return manifest if whole and manifest.key == key else None


def run_step(out: Path, number: int, step: PipelineStep[Any], before: Manifest, say: Say) -> Done:
    """Run a step on what the one before let through; a killed step resumes after its last finished shard."""
    key = step_key(step.name, step.settings(), step.code, before.digest)
    folder = f"steps/{number:02d}-{step.name}-{key}"
    if (finished := read_manifest(out, folder, key)) is not None:
        return Done(finished, cached=True)
    here = out / folder
    here.mkdir(parents=True, exist_ok=True)
    shards = before.candidate_shards(out)
    started_s = time.perf_counter()
    first, left = 0, []
    for shard in shards:
        left.append((shard, first))
        first += rows_in(shard)
    waiting = [(shard, at) for shard, at in left if not _is_done(here, shard)]
    if len(waiting) < len(left):
        say(f"{step.name}: {len(left) - len(waiting)} of {len(left)} shards are done already")
    try:
        if waiting:
            step.prepare(shards)
        for shard, at in waiting:
            _apply_to_shard(step, shard, at, here)
            say(f"{step.name}: {shard.name}")
    finally:
        step.close()
    manifest = finish_step(out, folder, step.name, key, step.settings(), first, time.perf_counter() - started_s)
    return Done(manifest, cached=False)


def _apply_to_shard(step: PipelineStep[Any], shard: Path, first: int, folder: Path) -> None:
    rows = [row for batch in read_candidates(shard) for row in batch]
    outcomes = step.apply(rows, first)
    assert len(outcomes) == len(rows)
    write_shard(folder, shard.name, step.name, outcomes)


def write_shard(folder: Path, name: str, step: str, outcomes: Sequence[Outcome]) -> None:
    """Write the ledger first: a shard whose candidates are there is done."""
    excluded = [outcome for outcome in outcomes if isinstance(outcome, Exclusion)]
    write_ledger(folder / name.replace("part-", "ledger-"), step, excluded)
    write_candidates(folder / name, [outcome for outcome in outcomes if isinstance(outcome, Candidate)])


def _is_done(folder: Path, shard: Path) -> bool:
    """Return whether a shard's result can be read; a torn one is made again."""
    try:
        rows_in(folder / shard.name)
        rows_in(folder / shard.name.replace("part-", "ledger-"))
    except (OSError, pa.ArrowException):
        return False
    return True


def finish_step(
    out: Path, folder: str, name: str, key: str, settings: Mapping[str, Any], rows: int, seconds: float
) -> Manifest:
    """Count what is on disk and write the manifest."""
    here = out / folder
    reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    digest = hashlib.sha256()
    kept = 0
    shards = {}
    for path in sorted(here.glob("*.parquet")):
        shards[path.name] = path.stat().st_size
        if path.name.startswith("ledger-"):
            for (column,) in read_column(path, ["reason"]):
                reasons.update(column)
        else:
            for (column,) in read_column(path, ["source"]):
                sources.update(column)
                kept += len(column)
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    manifest = Manifest(
        name, key, settings, rows, kept, dict(reasons), dict(sources), shards, digest.hexdigest(), seconds, folder
    )
    write_atomically(here / MANIFEST, json.dumps(asdict(manifest), indent=1).encode(), "a step's manifest")
    return manifest


def refuse_empty(manifest: Manifest) -> None:
    """Raise DataError when the step has left nothing."""
    if manifest.rows_out == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(manifest.reasons.items())) or "none"
        raise DataError(
            f"step '{manifest.step}' leaves none of {manifest.rows_in} problems (excluded: {reasons}); its ledger is "
            f"in {manifest.folder}: see or1 data why, then loosen the step or give other sources"
        )
