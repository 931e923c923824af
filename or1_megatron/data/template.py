"""The only place where messages become token ids: the chat template, and the limit on a prompt's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from or1_megatron.types import Int32Array, Prompt
from or1_verify.problems.rows import DataError, RowError
from or1_verify.problems.unusable import UnusableRows
from or1_verify.types import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BATCH = 1024  # prompts given to the tokenizer at once: its fast implementation spreads them over threads


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Lengths of the prompts given to ``make_prompts``."""

    limit_tokens: int
    kept: int
    too_long: int
    """How many were dropped."""
    longest_tokens: int
    """Length of the longest prompt, dropped ones included."""
    first: str
    """Origin of the first prompt."""

    def refuse_none_kept(self) -> None:
        """Raise DataError when all prompts were dropped."""
        if self.too_long and not self.kept:
            raise DataError(
                f"none of {self.too_long} prompts (from {self.first} on) fits into max_prompt_tokens = "
                f"{self.limit_tokens}; the longest has {self.longest_tokens} tokens"
            )


class ChatTemplate:
    """A tokenizer's chat template with its generation prompt, which for a reasoning model may open ``<think>``.

    Raises DataError when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"tokenizer of '{tokenizer.name_or_path}' has no chat template; expected chat_template in "
                "tokenizer_config.json or a chat_template.jinja beside it (base models often lack one)"
            )
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[Message]) -> str:
        """Return the prompt as text, generation prompt included."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        return rendered

    def token_ids(self, messages: Sequence[Message]) -> Int32Array:  # [p]
        return self._encode([self.text(messages)])[0]

    def make_prompts(
        self, problems: Sequence[Problem], max_prompt_tokens: int, unusable: UnusableRows | None = None
    ) -> tuple[list[Prompt], PromptReport]:
        """Return prompts in the order of the problems; those over the limit are left out and counted.

        Args:
            unusable: takes the rows whose messages the template refuses; the caller settles them, and looks whether any
                prompt is kept. None: both are refused.

        Raises:
            DataError: unusable rows, or no prompt is short enough.
        """
        faults = UnusableRows() if unusable is None else unusable
        prompts: list[Prompt] = []
        longest = too_long = 0
        for start in range(0, len(problems), _BATCH):
            chunk = [(problem, self._render(problem, faults)) for problem in problems[start : start + _BATCH]]
            rendered = [(problem, text) for problem, text in chunk if text is not None]
            encoded = self._encode([text for _, text in rendered])
            for (problem, _), ids in zip(rendered, encoded, strict=True):
                longest = max(longest, len(ids))
                if len(ids) <= max_prompt_tokens:
                    prompts.append(Prompt(problem, ids))
                else:
                    too_long += 1
        first = problems[0].origin if problems else ""
        report = PromptReport(max_prompt_tokens, len(prompts), too_long, longest, first)
        if unusable is None:
            faults.refuse()
            report.refuse_none_kept()
        return prompts, report

    def _render(self, problem: Problem, unusable: UnusableRows) -> str | None:
        from jinja2 import TemplateError

        try:
            return self.text(problem.messages)
        except TemplateError as error:  # templates refuse roles or orders of roles that they do not know
            roles = [message.role for message in problem.messages]
            detail = f"field 'prompt': the chat template refuses messages with roles {roles}: {error}"
            unusable.add(RowError(problem.origin, "the chat template refuses its messages", detail))
            return None

    def _encode(self, texts: Sequence[str]) -> list[Int32Array]:
        # The template writes the special tokens itself, so the tokenizer must add none (a second BOS, for one).
        encoded = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an HF folder on disk. Raises DataError when the folder or its tokenizer cannot be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not Path(folder).is_dir():
        raise DataError(f"{folder}: no such folder; expected a model in HF format with its tokenizer")
    # Without any of these transformers makes an empty tokenizer from config.json, and says nothing.
    if not any((Path(folder) / name).is_file() for name in _VOCABULARIES):
        raise DataError(f"{folder}: holds no tokenizer; expected one of {', '.join(_VOCABULARIES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: its tokenizer cannot be loaded (expected tokenizer.json): {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
