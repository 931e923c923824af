"""Loads a model's tokenizer, and turns messages into token ids by its chat template.

Token ids and text are those of the folder's ``tokenizer.json``, as the tokenizers library reads it.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError

from or1_megatron.types import Int32Array
from or1_megatron.weights.files import is_lfs_pointer
from or1_verify.answer import left_open
from or1_verify.problems.rows import DataError
from or1_verify.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_DATE: Final = datetime.date(2024, 7, 26)  # Llama 3.2's own where there is no clock
_SAMPLE: Final = "Let x = 12345.678:\n\n  f(x) = \\frac{x}{2} - 90\tis  what?  答案：é"
"""Text in which tokenizers differ: digits, white space, punctuation, other alphabets."""


class ChatTemplate:
    """A tokenizer with its chat template. A reasoning model's template may open ``<think>`` in the generation prompt.

    Args:
        vocabulary: the model's ``vocab_size``. A prompt with a token id of ``vocabulary`` or above is refused.

    Raises:
        DataError: the tokenizer has no chat template, or the template fails or drops the user's text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"tokenizer of '{tokenizer.name_or_path}' has no chat template; expected chat_template in "
                "tokenizer_config.json or a chat_template.jinja beside it (base models often lack one)"
            )
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        try:
            said = self.render([Message("user", _SAMPLE)])
        except TemplateSyntaxError as error:
            raise DataError(f"{self._name()} is broken at line {error.lineno}: {error.message}") from None
        except TemplateError:  # a template may refuse a single turn of the user
            return
        except Exception as error:
            raise DataError(f"{self._name()} fails: {type(error).__name__}: {error}") from error
        if _SAMPLE.strip() not in said:
            raise DataError(f"{self._name()} leaves out what the user says; of {_SAMPLE!r} it makes {said!r}")

    def _name(self) -> str:
        return f"the chat template of '{self._tokenizer.name_or_path}' (chat_template.jinja or tokenizer_config.json)"

    def token_ids(self, messages: Sequence[Message]) -> Int32Array:  # [p]
        return self.encode([self.render(messages)])[0]

    def opened(self, messages: Sequence[Message]) -> str:
        """Return the tag of reasoning that the template opens, and does not close, after these messages; else ""."""
        return left_open(self.render(messages))

    def check_end_of_turn(self, folder: Path) -> None:
        """Log a warning if the template ends the assistant's turn with a token that is no EOS token.

        Raises DataError if the folder's generation_config.json or config.json cannot be read.
        """
        said = "42"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
        try:
            rendered = str(self._tokenizer.apply_chat_template(turns, tokenize=False))
        except TemplateError:
            return
        behind = self._tokenizer(rendered.rpartition(said)[2], add_special_tokens=False)["input_ids"]
        ending = {self._tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            if (folder / name).is_file():
                try:
                    listed = json.loads((folder / name).read_text()).get("eos_token_id")
                except (ValueError, AttributeError) as error:
                    raise DataError(f"{folder / name}: not a JSON object ({error})") from None
                ending |= set(listed if isinstance(listed, list) else [listed])
        end = next((token for token in behind if token in self._tokenizer.added_tokens_decoder), None)  # no mere text
        if end is not None and end not in ending:
            log.warning(
                "%s: its chat template ends a turn with %r (token %d), and responses end with token %s alone: they may "
                "run on to the length limit. Add it to eos_token_id in generation_config.json if the model writes it",
                folder,
                self._tokenizer.convert_ids_to_tokens(end),
                end,
                " or ".join(str(token) for token in sorted(token for token in ending if token is not None)),
            )

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt's text. A template that asks for the date (Llama 3.2) always gets ``_DATE``."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        rendered = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, strftime_now=_DATE.strftime
        )
        assert isinstance(rendered, str)
        return rendered

    def encode(self, texts: Sequence[str]) -> list[Int32Array]:
        """Return the token ids of rendered prompts. Raises DataError for a token id that the model lacks."""
        # The template writes the special tokens itself, so the tokenizer must add none (a second BOS, for one).
        encoded = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        for text, ids in zip(texts, encoded, strict=True):
            if self._vocabulary is not None and max(ids, default=0) >= self._vocabulary:
                token = self._tokenizer.convert_ids_to_tokens(max(ids))
                raise DataError(
                    f"'{self._tokenizer.name_or_path}': a prompt has token {max(ids)} ({token!r}), and the model's "
                    f"vocab_size is {self._vocabulary}; expected the model's own tokenizer. The prompt: {text[:200]!r}"
                )
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an HF folder on disk, exactly as in its ``tokenizer.json`` if it has one.

    AutoTokenizer is used only if there is no ``tokenizer.json``, because for many folders it chooses a class that
    replaces the file's pre-tokenizer and decoder (transformers 5, issues 45488 and 45920).

    Raises:
        DataError: the folder or its tokenizer cannot be read, or the tokenizer's ids or text differ from the file's.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; expected a model in HF format with its tokenizer")
    # Without any of these files transformers makes an empty tokenizer from config.json, without an error.
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise DataError(f"{folder}: holds no tokenizer; expected one of {', '.join(_VOCABULARIES)}")
    file = folder / _VOCABULARIES[0]
    if file.is_file() and is_lfs_pointer(file):
        raise DataError(f"{file} is a Git LFS pointer, not the tokenizer: run git lfs pull, or hf download")
    try:
        loader = PreTrainedTokenizerFast if file.is_file() else AutoTokenizer
        tokenizer = loader.from_pretrained(folder, local_files_only=True)
        if file.is_file():
            _check_like_file(tokenizer, file)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder}: its tokenizer cannot be loaded (expected tokenizer.json): {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _check_like_file(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(file))
    ids = plain.encode(_SAMPLE, add_special_tokens=False).ids
    text = plain.decode(ids, skip_special_tokens=False)
    loaded = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if loaded != ids or back != text:
        raise DataError(
            f"{file.parent}: transformers' tokenizer is not the one of tokenizer.json: of {_SAMPLE!r} it makes "
            f"{tokenizer.decode(loaded)!r} and of the file's ids {back!r}, the file {text!r}"
        )
