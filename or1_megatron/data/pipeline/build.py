"""A whole build: the steps in order, each cached by its input, then the dataset and its state in ``build.json``."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.answers import Answers
from or1_megatron.data.pipeline.code_solutions import CodeSolutions
from or1_megatron.data.pipeline.contamination import Decontamination
from or1_megatron.data.pipeline.dataset import write_dataset
from or1_megatron.data.pipeline.difficulty import Difficulty
from or1_megatron.data.pipeline.duplicates import ExactDuplicates, NearDuplicates
from or1_megatron.data.pipeline.embedding import EmbeddingDuplicates
from or1_megatron.data.pipeline.judges import Judges
from or1_megatron.data.pipeline.normalise import normalise
from or1_megatron.data.pipeline.recipe import Recipe
from or1_megatron.data.pipeline.sampling import OpenSampler
from or1_megatron.data.pipeline.statements import Statements
from or1_megatron.data.pipeline.steps import Done, MakeVerifiers, Manifest, PipelineStep, Say, refuse_empty, run_step
from or1_megatron.runtime.files import write_atomically
from or1_verify.problems.rows import DataError

STATE = "build.json"
DATASET = "dataset"
UNUSABLE_EVALUATED = "unusable_evaluation_rows.jsonl"


def build(
    recipe: Recipe, make: MakeVerifiers, open_sampler: OpenSampler, say: Say, until: str | None = None
) -> list[Done]:
    """Run what has not been run, and write the dataset. With ``until``, stop after that step, without a dataset.

    Raises:
        DataError: a source cannot be used, a step leaves nothing, or a model does not answer. Finished work is kept.
        SandboxUnavailable and the like: from ``make``.
    """
    names = ["normalise", *(step.name for step in steps_of(recipe, make, open_sampler))]
    if until is not None and until not in names:
        raise DataError(f"--until {until}: no such step in this recipe; expected one of: {', '.join(names)}")
    recipe.out.mkdir(parents=True, exist_ok=True)
    with _locked(recipe.out):
        done: list[Done] = []

        def note(step: Done) -> None:
            done.append(step)
            _report(step, say)
            _write_state(recipe, done, finished=False)
            refuse_empty(step.manifest)

        note(normalise(recipe.out, recipe.sources, recipe.unusable, say))
        for number, step in enumerate(steps_of(recipe, make, open_sampler), start=1):
            if until == done[-1].manifest.step:
                return done
            note(run_step(recipe.out, number, step, done[-1].manifest, say))
        if until is None:
            counts = write_dataset(recipe.out / DATASET, done[-1].manifest.candidate_shards(recipe.out))
            say("dataset: " + ", ".join(f"{count} {ability}" for ability, count in sorted(counts.items())))
            _write_state(recipe, done, finished=True)
    return done


def steps_of(recipe: Recipe, make: MakeVerifiers, open_sampler: OpenSampler) -> list[PipelineStep[Any]]:
    """Return the recipe's steps after ``normalise``, in order."""
    steps: list[PipelineStep[Any]] = [
        ExactDuplicates(within=True),
        NearDuplicates(recipe.duplicates, within=True),
        Statements(recipe.statements),
    ]
    if recipe.answers is not None:
        steps.append(Answers(recipe.answers, make))
    steps += [ExactDuplicates(), NearDuplicates(recipe.duplicates)]
    if recipe.duplicates.embedding is not None:
        steps.append(EmbeddingDuplicates(recipe.duplicates.embedding))
    if recipe.decontaminate.against:
        steps.append(Decontamination(recipe.decontaminate, recipe.out / UNUSABLE_EVALUATED))
    if recipe.code is not None:
        steps.append(CodeSolutions(recipe.code, make))
    results = recipe.out / "results"
    if recipe.difficulty is not None:
        steps.append(Difficulty(recipe.difficulty, results / "difficulty", open_sampler, make))
    if recipe.judges is not None:
        steps.append(Judges(recipe.judges, results / "votes", open_sampler))
    return steps


def prune(out: Path) -> list[str]:
    """Delete the results of steps that the newest build does not use; return their folders' names."""
    state = read_state(out)
    with _locked(out):
        used = {Path(step["folder"]).name for step in state["steps"]}
        unused = sorted(folder for folder in (out / "steps").iterdir() if folder.name not in used)
        for folder in unused:
            shutil.rmtree(folder)
    return [folder.name for folder in unused]


def read_state(out: Path) -> dict[str, Any]:
    """Read ``build.json`` of the newest build in a folder. Raises DataError when there is none."""
    path = out / STATE
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected the folder ('out') of an or1 data build") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); run or1 data build again") from None
    assert isinstance(state, dict)
    return state


def manifests(out: Path) -> list[Manifest]:
    """Return the manifests of the newest build's steps, in order."""
    return [Manifest(**step) for step in read_state(out)["steps"]]


def _report(done: Done, say: Say) -> None:
    manifest = done.manifest
    how = "cached" if done.cached else f"{manifest.seconds:.1f} s"
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(manifest.reasons.items()))
    say(f"{manifest.step}: {manifest.rows_in} -> {manifest.rows_out} ({how}){': ' + reasons if reasons else ''}")


def _write_state(recipe: Recipe, done: Sequence[Done], finished: bool) -> None:
    state = {
        "finished": finished,
        "recipe": recipe.model_dump(mode="json"),
        "steps": [asdict(step.manifest) for step in done],
        "cached": [step.cached for step in done],
    }
    write_atomically(recipe.out / STATE, json.dumps(state, indent=1).encode(), "the state of the build")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises DataError when another build holds it."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{out}: another or1 data build works in this folder; wait for it, or set another out"
            ) from None
        yield
