"""Makes a run's prompts: reads and checks its problem sets, tokenizes the prompts, and drops prompts that are too long.

``read_problems`` takes seconds: it reads the files and refuses data rows that do not fit their column layout.
``make_prompts`` may take minutes: it reads every ground truth and tokenizes every prompt. The engines can start
meanwhile. ``encode_problems`` drops prompts longer than ``data.max_prompt_tokens``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jinja2 import TemplateError

from or1_megatron.config.schema import Config
from or1_megatron.config.stages import ProblemSetConfig
from or1_megatron.data.problems import check_ground_truths, filter_by_difficulty, load_problems
from or1_megatron.data.stream import PromptSource
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.types import Prompt
from or1_megatron.weights.families import read_hf_config
from or1_verify.answer import left_open
from or1_verify.problems.problem import no_verifier
from or1_verify.problems.rows import DataError, RowError
from or1_verify.problems.unusable import FILE_NAME, UnusableRows
from or1_verify.types import Problem, Verifier
from or1_verify.verifiers import build_verifiers, known_abilities

log = logging.getLogger(__name__)

_BATCH: Final = 1024  # prompts given to the tokenizer at once: its fast implementation spreads them over threads


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a problem set that are not too long, and how many prompts were too long."""

    prompts: list[Prompt]
    limit_tokens: int
    too_long: int
    """Number of prompts that were dropped as too long."""
    longest_tokens: int
    """Length of the longest prompt, dropped prompts included."""
    first: str
    """Origin of the first prompt."""

    def check(self, path: Path) -> None:
        """Log how many prompts of the set at ``path`` were too long. Raises DataError if no prompt is left."""
        if self.too_long and not self.prompts:
            raise DataError(
                f"none of {self.too_long} prompts (from {self.first} on) fits into max_prompt_tokens = "
                f"{self.limit_tokens}; the longest has {self.longest_tokens} tokens"
            )
        if not self.prompts:
            raise DataError(f"{path}: no usable problem is left")
        if self.too_long:
            log.warning(
                "%s: %d of %d prompts are longer than data.max_prompt_tokens = %d and were dropped; the longest has %d",
                path,
                self.too_long,
                self.too_long + len(self.prompts),
                self.limit_tokens,
                self.longest_tokens,
            )


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """The problems of a run as read from files, before ground truths and lengths are checked."""

    train: list[list[Problem]]
    """One list per source of ``data.train``."""
    held_out: list[list[Problem]]
    """One list per set of ``evaluate.data``."""
    unusable: UnusableRows
    verifiers: Mapping[str, Verifier]
    """The verifier of each ability that occurs."""

    def close(self) -> None:
        """Close the verifiers, and drop the problems, which may be large."""
        for verifier in self.verifiers.values():
            verifier.close()
        self.train.clear()
        self.held_out.clear()


def read_problems(config: Config) -> ProblemSets:
    """Read all problems of a run; refuse unusable data rows, unless ``data.unusable`` is drop.

    The caller closes the result. If a row is refused, ground truths and prompts are checked here too, so that one error
    names all unusable rows.

    Raises:
        DataError: a file cannot be read, rows are unusable, or one of the user's own verifiers has no problems.
        SandboxUnavailable: code problems cannot be verified on this machine.
        VerifierBroken: one of the user's own verifiers cannot be loaded.
    """
    known, unusable = known_abilities(config.verify), UnusableRows()

    def read(source: ProblemSetConfig) -> list[Problem]:
        usable = []
        for problem in load_problems(source.path, source.split, unusable, columns=source.columns):
            if problem.ability in known:
                usable.append(problem)
            else:
                unusable.add(no_verifier(problem, known))
        return usable

    train = [read(source) for source in config.data.train]
    held_out = [read(source) for source in config.evaluate.data]
    abilities = {problem.ability for problems in (*train, *held_out) for problem in problems}
    if idle := sorted(config.verify.custom.keys() - abilities):
        raise DataError(f"verify.custom: no problem has ability {', '.join(idle)}; theirs are {sorted(abilities)}")
    sets = ProblemSets(train, held_out, unusable, build_verifiers(config.verify, abilities))
    if unusable and config.data.unusable == "refuse":
        try:
            make_prompts(config, sets)
        finally:
            sets.close()
    return sets


def make_prompts(config: Config, sets: ProblemSets) -> tuple[list[PromptSource], dict[str, list[Prompt]]]:
    """Check every ground truth, and return (training sources with their prompts, held-out prompts by their set's name).

    Raises:
        DataError: rows are unusable (one error names all), no prompt is left, or too few prompts are left for a step.
    """
    template = ChatTemplate(load_tokenizer(config.model.hf), read_hf_config(config.model.hf)["vocab_size"])
    template.check_end_of_turn(config.model.hf)
    data, unusable = config.data, sets.unusable
    train = [check_ground_truths(problems, sets.verifiers, unusable) for problems in sets.train]
    held_out = [check_ground_truths(problems, sets.verifiers, unusable) for problems in sets.held_out]
    read = [len(problems) for problems in train]
    if data.difficulty_model is not None:
        train = [filter_by_difficulty(problems, data.difficulty_model, unusable) for problems in train]
    trained = [encode_problems(template, problems, data.max_prompt_tokens, unusable) for problems in train]
    evaluated = [encode_problems(template, problems, data.max_prompt_tokens, unusable) for problems in held_out]
    _drop_repeated(trained)
    unusable.settle(data.unusable, config.run.folder / FILE_NAME, "data.unusable=drop")
    sources, by_title = [], {}
    for made, source in zip(trained, data.train, strict=True):
        made.check(source.path)
        sources.append(PromptSource(made.prompts, source.repeat))
    _check_enough(config, sources, read, [len(problems) for problems in train])
    for made, held in zip(evaluated, config.evaluate.data, strict=True):
        made.check(held.path)
        by_title[held.title] = made.prompts
    _warn_of_leaks(sources, [prompt for prompts in by_title.values() for prompt in prompts])
    return sources, by_title


def encode_problems(
    template: ChatTemplate, problems: Sequence[Problem], limit_tokens: int, unusable: UnusableRows
) -> PromptSet:
    """Return the prompts of up to ``limit_tokens`` tokens, in the problems' order, and count the longer prompts.

    Problems whose messages the template refuses are added to ``unusable``.
    """
    prompts: list[Prompt] = []
    longest = too_long = 0
    for start in range(0, len(problems), _BATCH):
        chunk = [(problem, _render(template, problem, unusable)) for problem in problems[start : start + _BATCH]]
        rendered = [(problem, text) for problem, text in chunk if text is not None]
        encoded = template.encode([text for _, text in rendered])
        for (problem, text), ids in zip(rendered, encoded, strict=True):
            longest = max(longest, len(ids))
            if len(ids) <= limit_tokens:
                prompts.append(Prompt(problem, ids, left_open(text)))
            else:
                too_long += 1
    return PromptSet(prompts, limit_tokens, too_long, longest, problems[0].origin if problems else "")


def _render(template: ChatTemplate, problem: Problem, unusable: UnusableRows) -> str | None:
    try:
        return template.render(problem.messages)
    except TemplateError as error:  # templates refuse roles or orders of roles that they do not know
        roles = [message.role for message in problem.messages]
        detail = f"field 'prompt': the chat template refuses messages with roles {roles}: {error}"
        unusable.add(RowError(problem.origin, "the chat template refuses its messages", detail))
        return None


def thinking_rule(sources: Sequence[PromptSource]) -> str:
    """Return a text that says which part of a response is searched for the answer (``or1_verify.answer``)."""
    opened = sorted({prompt.opened for source in sources for prompt in source.prompts})
    rules = [
        f"the chat template opens {tag}, so a response counts only from where it closes it"
        if tag
        else "the chat template opens no reasoning, so all of a response is read, unless it opens one itself"
        for tag in opened
    ]
    return "; ".join(rules)


def _check_enough(config: Config, sources: Sequence[PromptSource], read: Sequence[int], rated: Sequence[int]) -> None:
    """Raise DataError if the sources of a stage have fewer prompts than one of the stage's steps takes.

    Args:
        read: number of problems of each source before the difficulty filter.
        rated: number of problems of each source after the difficulty filter.
    """
    for stage in config.stages:
        taken = [index for index, repeat in enumerate(config.repeats(stage)) if repeat]
        kept = sum(len(sources[index].prompts) for index in taken)
        if stage.prompts_per_step > kept:
            before, difficult = sum(read[index] for index in taken), sum(rated[index] for index in taken)
            dropped = f"data.max_prompt_tokens = {config.data.max_prompt_tokens} dropped {difficult - kept}"
            if (model := config.data.difficulty_model) is not None:
                dropped = f"data.difficulty_model = {model} dropped {before - difficult}, {dropped}"
            raise DataError(
                f"data.train: of {before} problems"
                + (" in the sources of its mixture" if stage.mixture else "")
                + f" {kept} are left ({dropped}), fewer than prompts_per_step = {stage.prompts_per_step} of stage "
                f"'{stage.name}'; add problems, loosen the filter or lower prompts_per_step"
            )


def _drop_repeated(sources: Sequence[PromptSet]) -> None:
    """Remove, in place, the prompts of problems that are in an earlier source too."""
    seen: set[str] = set()
    for source in sources:
        own = [prompt for prompt in source.prompts if prompt.problem.id not in seen]
        if repeated := len(source.prompts) - len(own):
            log.warning(
                "%d problems of the source of %s are in an earlier source and were left out", repeated, source.first
            )
        source.prompts[:] = own
        seen |= {prompt.problem.id for prompt in own}


def _warn_of_leaks(sources: Sequence[PromptSource], evaluated: Sequence[Prompt]) -> None:
    """Log a warning if held-out prompts are in the training data too, with the same token ids."""
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
