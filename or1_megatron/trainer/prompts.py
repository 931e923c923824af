"""The prompts of a run: its problems read, checked, filtered and measured."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from or1_megatron.config.schema import Config
from or1_megatron.data.problems import check_ground_truths, filter_by_difficulty, load_problems
from or1_megatron.data.stream import PromptSource
from or1_megatron.data.template import ChatTemplate, PromptReport, load_tokenizer
from or1_megatron.types import Prompt
from or1_verify.problems.problem import no_verifier
from or1_verify.problems.rows import DataError, RowError
from or1_verify.problems.unusable import FILE_NAME, UnusableRows
from or1_verify.types import Problem
from or1_verify.verifiers import build_verifiers, known_abilities

log = logging.getLogger(__name__)

ProblemSets = list[list[Problem]]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one source or held-out set."""

    path: Path
    prompts: list[Prompt]
    report: PromptReport

    def check(self) -> None:
        """Log how many prompts were too long. Raises DataError when all were, or none was usable."""
        if self.report.too_long:
            log.warning(
                "%s: %d of %d prompts are longer than data.max_prompt_tokens = %d and were dropped; the longest has %d",
                self.path,
                self.report.too_long,
                self.report.too_long + self.report.kept,
                self.report.limit_tokens,
                self.report.longest_tokens,
            )
        self.report.refuse_none_kept()
        if not self.prompts:
            raise DataError(f"{self.path}: no usable problem is left")


def load_prompts(config: Config) -> tuple[list[PromptSource], dict[str, list[Prompt]], frozenset[str]]:
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
    read = [len(problems) for problems in train]
    if config.data.difficulty_model is not None:
        train = [filter_by_difficulty(problems, config.data.difficulty_model, unusable) for problems in train]

    def prompts_of(problems: list[Problem], path: Path) -> PromptSet:
        return PromptSet(path, *template.make_prompts(problems, config.data.max_prompt_tokens, unusable))

    trained = [prompts_of(problems, each.path) for problems, each in zip(train, config.data.train, strict=True)]
    held = [prompts_of(problems, each.path) for problems, each in zip(held_out, config.evaluate.data, strict=True)]
    drop_repeated(trained, unusable)
    unusable.settle(config.data.unusable, config.run.folder / FILE_NAME, "data.unusable=drop")
    for one in trained:
        one.check()
    sources = [
        PromptSource(one.prompts, each.repeat, each.weight)
        for one, each in zip(trained, config.data.train, strict=True)
    ]
    check_enough(config, sources, read, [len(problems) for problems in train])
    for one in held:
        one.check()
    warn_of_leaks(sources, [prompt for one in held for prompt in one.prompts])
    evaluated = {each.title: one.prompts for one, each in zip(held, config.evaluate.data, strict=True)}
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


def check_enough(config: Config, sources: Sequence[PromptSource], read: Sequence[int], filtered: Sequence[int]) -> None:
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


def drop_repeated(sources: Sequence[PromptSet], unusable: UnusableRows) -> None:
    """Take out the prompts whose problem an earlier source has; they are ``unusable``."""
    origin_of: dict[str, str] = {}
    for source in sources:
        own = {prompt.problem.id: prompt.problem.origin for prompt in source.prompts}
        for problem in own.keys() & origin_of.keys():
            detail = f"the same problem as {origin_of[problem]}; expected it in one source only"
            unusable.add(RowError(own[problem], "the same problem in an earlier source", detail))
        source.prompts[:] = [prompt for prompt in source.prompts if prompt.problem.id not in origin_of]
        origin_of |= own


def warn_of_leaks(sources: Sequence[PromptSource], evaluated: Sequence[Prompt]) -> None:
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
