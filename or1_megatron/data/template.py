"""The one place where messages become token ids: the chat template, and the limit on a prompt's length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from or1_megatron.data.rows import DataError
from or1_megatron.types import Int32Array, Message, Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BATCH = 1024  # prompts given to the tokenizer at once: its fast implementation spreads them over threads


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What became of the problems given to ``make_prompts``."""

    kept: int
    too_long: int
    """Dropped: longer than the limit."""
    longest_kept_tokens: int
    longest_tokens: int
    """Of all, dropped ones included."""


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
        """The prompt as text, generation prompt included."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        return rendered

    def token_ids(self, messages: Sequence[Message]) -> Int32Array:  # [p]
        return self._encode([self.text(messages)])[0]

    def make_prompts(self, problems: Sequence[Problem], max_prompt_tokens: int) -> tuple[list[Prompt], PromptReport]:
        """Prompts in the order of the problems; those over the limit are left out and counted.

        Raises DataError naming the row when the template refuses its messages, and when no prompt is left.
        """
        prompts: list[Prompt] = []
        longest = longest_kept = 0
        for start in range(0, len(problems), _BATCH):
            chunk = problems[start : start + _BATCH]
            for problem, ids in zip(chunk, self._encode([self._render(problem) for problem in chunk]), strict=True):
                longest = max(longest, len(ids))
                if len(ids) <= max_prompt_tokens:
                    longest_kept = max(longest_kept, len(ids))
                    prompts.append(Prompt(problem, ids))
        if not prompts:
            raise DataError(
                f"none of {len(problems)} prompts ({_where(problems)}) fits into max_prompt_tokens = "
                f"{max_prompt_tokens}; "
                f"the longest has {longest} tokens"
            )
        return prompts, PromptReport(len(prompts), len(problems) - len(prompts), longest_kept, longest)

    def _render(self, problem: Problem) -> str:
        from jinja2 import TemplateError

        try:
            return self.text(problem.messages)
        except TemplateError as error:  # templates refuse roles or orders of roles that they do not know
            roles = [message.role for message in problem.messages]
            raise DataError(
                f"{problem.origin}: field 'prompt': the chat template refuses messages with roles {roles}: {error}"
            ) from None

    def _encode(self, texts: Sequence[str]) -> list[Int32Array]:
        # The template writes the special tokens itself, so the tokenizer must add none (a second BOS, for one).
        encoded = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def _where(problems: Sequence[Problem]) -> str:
    return f"from {problems[0].origin} on" if problems else "there are no problems"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an HF folder on disk. Raises DataError when the folder or its tokenizer cannot be read."""
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
