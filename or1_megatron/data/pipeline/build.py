"""Runs a whole data build: its steps in order, then the dataset. Also answers why a problem was left out.

``build.json`` lists the finished steps. The dataset has the columns of Skywork-OR1-RL-Data, one Parquet file per
ability, as ``or1 train`` loads it.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import batched
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from or1_megatron.data.pipeline.contamination import Decontamination
from or1_megatron.data.pipeline.difficulty import Difficulty
from or1_megatron.data.pipeline.duplicates import ExactDuplicates, NearDuplicates
from or1_megatron.data.pipeline.embedding import EmbeddingDuplicates
from or1_megatron.data.pipeline.judges import Judges
from or1_megatron.data.pipeline.normalise import normalise
from or1_megatron.data.pipeline.recipe import Recipe
from or1_megatron.data.pipeline.records import Candidate, Exclusion, read_candidates, read_outcomes
from or1_megatron.data.pipeline.sampling import OpenSampler
from or1_megatron.data.pipeline.solutions import Answers, CodeSolutions
from or1_megatron.data.pipeline.statements import Statements
from or1_megatron.data.pipeline.steps import Manifest, PipelineStep, Say, refuse_empty, run_step
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full, write_atomically
from or1_verify.problems.rows import DataError, published_row

STATE = "build.json"
DATASET = "dataset"
UNUSABLE_EVALUATED = "unusable_evaluation_rows.jsonl"


def build(recipe: Recipe, open_sampler: OpenSampler, say: Say) -> None:
    """Run a recipe's unfinished steps, then write the dataset. An error does not lose finished work.

    Raises:
        DataError: a source cannot be used, a step keeps no problem, or a model does not answer.
        SandboxUnavailable: programs (reference solutions or models' answers) cannot be run on this machine.
    """
    steps = steps_of(recipe, open_sampler)
    recipe.out.mkdir(parents=True, exist_ok=True)
    with _locked(recipe.out):
        done = [normalise(recipe.out, recipe.sources, recipe.unusable, say)]
        for number, step in enumerate([*steps, None]):
            _write_state(recipe, done)
            refuse_empty(done[-1])
            if step is not None:
                done.append(run_step(recipe.out, number + 1, step, done[-1], say))
        counts = write_dataset(recipe.out / DATASET, done[-1].paths(recipe.out))
        say("dataset: " + ", ".join(f"{count} {ability}" for ability, count in sorted(counts.items())))


def steps_of(recipe: Recipe, open_sampler: OpenSampler) -> list[PipelineStep[Any]]:
    """Return the recipe's steps after ``normalise``, in order."""
    steps: list[PipelineStep[Any]] = [
        ExactDuplicates(within=True),
        NearDuplicates(recipe.duplicates, within=True),
        Statements(),
    ]
    if recipe.answers is not None:
        steps.append(Answers(recipe.answers))
    steps += [ExactDuplicates(), NearDuplicates(recipe.duplicates)]
    if recipe.code is not None:  # before EmbeddingDuplicates, so that a problem that fails excludes no twin (the paper)
        steps.append(CodeSolutions(recipe.code))
    if recipe.duplicates.embedding is not None:
        steps.append(EmbeddingDuplicates(recipe.duplicates.embedding))
    if recipe.decontaminate.against:
        steps.append(Decontamination(recipe.decontaminate, recipe.out / UNUSABLE_EVALUATED))
    results = recipe.out / "results"
    if recipe.difficulty is not None:
        steps.append(Difficulty(recipe.difficulty, results, open_sampler))
    if recipe.judges is not None:
        steps.append(Judges(recipe.judges, results, open_sampler))
    return steps


def write_dataset(folder: Path, shards: Sequence[Path]) -> dict[str, int]:
    """Replace ``folder`` by ABILITY.parquet files of the shards' candidates; return each ability's candidate count."""
    models = sorted({model for row in read_candidates(shards) for model in row.difficulty})
    measured = [pa.field("model_difficulty", pa.struct([(model, pa.int64()) for model in models]))] if models else []
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
            ("extra_info", pa.struct([pa.field("index", pa.int64()), *measured])),
        ]
    )
    aside = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(aside, ignore_errors=True)
    writers: dict[str, pq.ParquetWriter] = {}
    counts: dict[str, int] = {}
    with naming_disk_full(folder, "the dataset"):
        aside.mkdir(parents=True)
        with ExitStack() as stack:
            for rows in batched(read_candidates(shards), 1024):
                tables: dict[str, list[dict[str, Any]]] = {}
                for row in rows:
                    index = counts[row.ability] = counts.get(row.ability, -1) + 1
                    rated = {"model_difficulty": {model: row.difficulty.get(model) for model in models}}
                    extra = {"index": index, **(rated if models else {})}
                    published = published_row(row.source, row.messages, row.ability, row.ground_truth, extra)
                    tables.setdefault(row.ability, []).append(published)
                for ability, table in tables.items():
                    if ability not in writers:
                        writer = pq.ParquetWriter(aside / f"{ability}.parquet", schema, compression="zstd")
                        writers[ability] = stack.enter_context(writer)
                    writers[ability].write_table(pa.Table.from_pylist(table, schema=schema))
        shutil.rmtree(folder, ignore_errors=True)
        aside.replace(folder)
    return {ability: last + 1 for ability, last in counts.items()}


def newest_build(out: Path) -> list[Manifest]:
    """Return the manifests of the newest build's steps, in order. Raises DataError if ``out`` holds no build."""
    path = out / STATE
    try:
        return [Manifest(**step) for step in json.loads(path.read_text())["steps"]]
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected the folder ('out') of an or1 data build") from None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: not the state of a build ({error}); run or1 data build again") from None


def ledger(out: Path) -> Iterator[tuple[str, Exclusion]]:
    """Yield (step, exclusion) for each candidate that the newest build left out, in the order of steps, then rows."""
    for step in newest_build(out):
        for outcome in read_outcomes(step.paths(out)):
            if isinstance(outcome, Exclusion):
                yield step.step, outcome


def kept(out: Path) -> Iterator[Candidate]:
    return read_candidates(newest_build(out)[-1].paths(out))


def why(out: Path, wanted: str) -> list[tuple[str, Exclusion | Candidate]]:
    """Return (step, exclusion) for each excluded row of one problem, and ("", candidate) for each kept row.

    ``wanted``: the problem's id, the id's first digits, or an origin such as file.jsonl:12. An id can have several
    rows, because exact duplicates within a source share an id. Raises DataError if no problem or several problems fit.
    """

    def is_wanted(row: Candidate) -> bool:
        return row.id.startswith(wanted) or f"/{row.origin}".endswith(f"/{wanted}")

    stayed = [row for row in kept(out) if is_wanted(row)]
    left = [(step, exclusion) for step, exclusion in ledger(out) if is_wanted(exclusion.candidate)]
    ids = {row.id for row in (*stayed, *(exclusion.candidate for _, exclusion in left))}
    if not ids:
        raise DataError(
            f"{wanted}: no such problem in {out}; expected a problem's id (16 hex digits, or the first of them) "
            "or where it came from, such as train.jsonl:12"
        )
    if len(ids) > 1:
        raise DataError(f"{wanted}: {len(ids)} problems are meant, such as {', '.join(sorted(ids)[:4])}; name one")
    return [*(("", row) for row in stayed), *left]


def _write_state(recipe: Recipe, done: Sequence[Manifest]) -> None:
    state = {"recipe": recipe.model_dump(mode="json"), "steps": [asdict(manifest) for manifest in done]}
    write_atomically(recipe.out / STATE, json.dumps(state, indent=1).encode(), "the state of the build")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the lock of a build's folder. Raises DataError if another build holds it."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{out}: another or1 data build works in this folder; wait for it, or set another out"
            ) from None
        yield
