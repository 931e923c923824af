"""The prompts of a run: its problems read, checked, filtered and measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from or1_megatron.config.schema import Config
from or1_megatron.data.problems import check_ground_truths, filter_by_difficulty
from or1_megatron.data.rows import DataError
from or1_megatron.data.stream import Source
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.trainer.preflight import abilities_of, read_problems
from or1_megatron.types import Problem, Prompt
from or1_megatron.verify.registry import build_verifiers, known_abilities

log = logging.getLogger(__name__)


def load_prompts(config: Config) -> tuple[list[Source], dict[str, list[Prompt]], frozenset[str]]:
    """(training sources, held-out prompts by the name of their set, abilities), every gold answer checked.

    Raises:
        DataError: a file or row that cannot be used, or no prompt left.
    """
    template = ChatTemplate(load_tokenizer(config.model.hf))
    train, held_out = read_problems(config)
    abilities = abilities_of([*train, *held_out], known_abilities(config.verify))
    verifiers = build_verifiers(config.verify, abilities)
    try:
        for problems in (*train, *held_out):
            check_ground_truths(problems, verifiers)
    finally:
        for verifier in verifiers.values():
            verifier.close()
    there = [len(problems) for problems in train]
    if config.data.difficulty_model is not None:
        train = [filter_by_difficulty(problems, config.data.difficulty_model) for problems in train]
    longest = config.data.max_prompt_tokens
    sources = [
        Source(short_prompts(template, problems, source.path, longest), source.repeat, source.weight)
        for problems, source in zip(train, config.data.train, strict=True)
    ]
    for stage in config.stages:
        repeats = config.repeats(stage)
        kept = sum(len(source.prompts) for source, repeat in zip(sources, repeats, strict=True) if repeat)
        if stage.prompts_per_step > kept:
            taken = [index for index, repeat in enumerate(repeats) if repeat]
            read, difficult = sum(there[index] for index in taken), sum(len(train[index]) for index in taken)
            dropped = f"data.max_prompt_tokens = {longest} dropped {difficult - kept}"
            if config.data.difficulty_model is not None:
                dropped = (
                    f"data.difficulty_model = {config.data.difficulty_model} dropped {read - difficult}, " + dropped
                )
            raise DataError(
                f"data.train: of {read} problems"
                + (" in the sources of its mixture" if stage.mixture else "")
                + f" {kept} are left ({dropped}), fewer than prompts_per_step = {stage.prompts_per_step} of stage "
                f"'{stage.name}'; add problems, loosen the filter or lower prompts_per_step"
            )
    evaluated = {
        held.title: short_prompts(template, problems, held.path, longest)
        for problems, held in zip(held_out, config.evaluate.data, strict=True)
    }
    warn_of_leaks(sources, [prompt for prompts in evaluated.values() for prompt in prompts])
    return sources, evaluated, abilities


def warn_of_leaks(sources: Sequence[Source], evaluated: Sequence[Prompt]) -> None:
    """Say when a held-out prompt is trained on as well, word for word."""
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


def short_prompts(template: ChatTemplate, problems: Sequence[Problem], path: Path, longest: int) -> list[Prompt]:
    """The prompts within the limit; how many are not is said on the console and in the log."""
    prompts, report = template.make_prompts(problems, longest)
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
