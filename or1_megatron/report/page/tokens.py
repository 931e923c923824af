"""The text of each token of a response, from the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
_LONGEST = 4
"""The most tokens that share a character: UTF-8 takes up to four bytes."""
_BROKEN = "\ufffd"
"""The text of an incomplete character."""


class TokenTexts:
    """Cuts a response into the texts of its tokens. A special token's text is its name."""

    def __init__(self, folder: Path) -> None:
        """``folder``: an HF folder. Raises FileNotFoundError, or ValueError naming the file."""
        path = folder / TOKENIZER
        if not path.is_file():
            raise FileNotFoundError(f"no {TOKENIZER} in {folder}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"{path}: not a tokenizer: {error}") from error
        self._decode = lru_cache(1 << 16)(lambda *ids: tokenizer.decode(ids, skip_special_tokens=False))

    def cut(self, token_ids: Sequence[int]) -> tuple[str, NDArray[np.uint16]]:
        """Return (text, [n] the number of UTF-16 units of each token's text, which browsers count).

        A character whose bytes several tokens share belongs to the last of them; the others have 0. Bytes that are not
        UTF-8 become U+FFFD.
        """
        texts: list[str] = []
        first = 0  # index of the first token without text
        for place in range(len(token_ids)):
            before = token_ids[max(first - 1, 0) : first]  # some tokenizers drop a space at the beginning of a text
            text = self._decode(*before, *token_ids[first : place + 1])[len(self._decode(*before)) :]
            if text.endswith(_BROKEN) and place + 1 < min(first + _LONGEST, len(token_ids)):
                texts.append("")
                continue
            texts.append(text)
            first = place + 1
        return "".join(texts), np.array([len(text.encode("utf-16-le")) // 2 for text in texts], dtype=np.uint16)
