"""The prompts of a run: its problems read, checked, filtered and measured."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from or1_megatron.config.schema import Config
from or1_megatron.data.problems import check_ground_truths, filter_by_difficulty, load_problems, no_verifier
from or1_megatron.data.rows import DataError, RowError
from or1_megatron.data.stream import Source
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.data.unusable import FILE_NAME, UnusableRows
from or1_megatron.types import Problem, Prompt
from or1_megatron.verify.registry import build_verifiers, known_abilities

log = logging.getLogger(__name__)

ProblemSets = list[list[Problem]]


def load_prompts(config: Config) -> tuple[list[Source], dict[str, list[Prompt]], frozenset[str]]:
    """Return (training sources, held-out prompts by the name of their set, abilities), every ground truth checked.

    Raises:
        DataError: a file that cannot be read, all unusable rows of all files at once, or no prompt left.
    """
    template = ChatTemplate(load_tokenizer(config.model.hf))
    unusable = UnusableRows()
    train, held_out = read_problems(config, unusable)
    abilities = abilities_of(*train, *held_out)
    verifiers = build_verifiers(config.verify, abilities)
    try:
        train = [check_ground_truths(problems, verifiers, unusable) for problems in train]
        held_out = [check_ground_truths(problems, verifiers, unusable) for problems in held_out]
    finally:
        for verifier in verifiers.values():
            verifier.close()
    read, model = [len(problems) for problems in train], config.data.difficulty_model
    if model is not None:
        train = [filter_by_difficulty(problems, model, unusable) for problems in train]
    longest = config.data.max_prompt_tokens
    prompts = [
        short_prompts(template, problems, source.path, longest, unusable)
        for problems, source in zip(train, config.data.train, strict=True)
    ]
    evaluated = {
        held.title: short_prompts(template, problems, held.path, longest, unusable)
        for problems, held in zip(held_out, config.evaluate.data, strict=True)
    }
    prompts = once_each(prompts, unusable)
    unusable.settle(config.data.unusable, config.run.folder / FILE_NAME, "data.unusable=drop")
    sources = [
        Source(own, source.repeat, source.weight) for own, source in zip(prompts, config.data.train, strict=True)
    ]
    check_enough(config, sources, read, [len(problems) for problems in train])
    for title, own in evaluated.items():
        if not own:
            raise DataError(f"evaluate.data: no problem of '{title}' is left")
    warn_of_leaks(sources, [prompt for own in evaluated.values() for prompt in own])
    return sources, evaluated, abilities


def read_problems(config: Config, unusable: UnusableRows) -> tuple[ProblemSets, ProblemSets]:
    """Return (training problems of each source, held-out problems of each set). Raises DataError.

    Problems whose ability nothing can verify are ``unusable``.
    """
    known = known_abilities(config.verify)

    def read(path: Path, split: str | None) -> list[Problem]:
        problems = load_problems(path, split, unusable)
        for problem in problems:
            if problem.ability not in known:
                unusable.add(no_verifier(problem, known))
        return [problem for problem in problems if problem.ability in known]

    return (
        [read(source.path, source.split) for source in config.data.train],
        [read(source.path, source.split) for source in config.evaluate.data],
    )


def abilities_of(*sets: Iterable[Problem]) -> frozenset[str]:
    return frozenset(problem.ability for problems in sets for problem in problems)


def check_enough(config: Config, sources: Sequence[Source], read: Sequence[int], filtered: Sequence[int]) -> None:
    """Raise DataError when a stage's sources have fewer prompts than one of its steps takes.

    Args:
        read: problems of each source before the difficulty filter.
        filtered: problems of each source after it.
    """
    for stage in config.stages:
        taken = [index for index, repeat in enumerate(config.repeats(stage)) if repeat]
        kept = sum(len(sources[index].prompts) for index in taken)
        if stage.prompts_per_step > kept:
            before, difficult = sum(read[index] for index in taken), sum(filtered[index] for index in taken)
            dropped = f"data.max_prompt_tokens = {config.data.max_prompt_tokens} dropped {difficult - kept}"
            if (model := config.data.difficulty_model) is not None:
                dropped = f"data.difficulty_model = {model} dropped {before - difficult}, {dropped}"
            raise DataError(
                f"data.train: of {before} problems"
                + (" in the sources of its mixture" if stage.mixture else "")
                + f" {kept} are left ({dropped}), fewer than prompts_per_step = {stage.prompts_per_step} of stage "
                f"'{stage.name}'; add problems, loosen the filter or lower prompts_per_step"
            )


def once_each(sources: Sequence[list[Prompt]], unusable: UnusableRows) -> list[list[Prompt]]:
    """Return the sources' prompts; one that an earlier source has too is ``unusable``."""
    origin_of: dict[str, str] = {}
    kept: list[list[Prompt]] = []
    for prompts in sources:
        own = []
        for prompt in prompts:
            problem = prompt.problem
            if problem.id in origin_of:
                detail = f"the same problem as {origin_of[problem.id]}; expected it in one source only"
                unusable.add(RowError(problem.origin, "the same problem in an earlier source", detail))
            else:
                own.append(prompt)
        origin_of |= {prompt.problem.id: prompt.problem.origin for prompt in own}
        kept.append(own)
    return kept


def warn_of_leaks(sources: Sequence[Source], evaluated: Sequence[Prompt]) -> None:
    """Log when a held-out prompt is trained on too, word for word."""
    trained = {prompt.token_ids.tobytes(): prompt.problem.origin for source in sources for prompt in source.prompts}
    leaked = [prompt for prompt in evaluated if prompt.token_ids.tobytes() in trained]
    if leaked:
        log.warning(
            "%d of %d held-out prompts are in the training data too (first: %s and %s): their accuracy will flatter",
            len(leaked),
            len(evaluated),
            leaked[0].problem.origin,
            trained[leaked[0].token_ids.tobytes()],
        )


def short_prompts(
    template: ChatTemplate, problems: Sequence[Problem], path: Path, longest: int, unusable: UnusableRows
) -> list[Prompt]:
    """Return the prompts within the limit; log how many are longer."""
    prompts, report = template.make_prompts(problems, longest, unusable)
    if report.too_long:
        log.warning(
            "%s: %d of %d prompts are longer than data.max_prompt_tokens = %d and were dropped; the longest has %d",
            path,
            report.too_long,
            len(problems),
            longest,
            report.longest_tokens,
        )
    return prompts
