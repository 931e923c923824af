"""Makes the data of responses that the HTML page shows in full: each token's text and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from or1_megatron.report.page.encoding import packet
from or1_megatron.report.page.rollout_table import BATCH_ROWS
from or1_megatron.runtime.rollout_store import open_rollouts

TOKENIZER = "tokenizer.json"
_TEXTS = ("prompt", "response", "ground_truth", "answer", "detail", "versions")
_TOKENS = {"log_probs": "log_prob", "log_prob_differences": "difference", "entropies": "entropy"}
_LONGEST = 4
"""Largest number of tokens that can share a character, which has up to four bytes in UTF-8."""
_BROKEN = "\ufffd"
"""Character that stands for an incomplete character in decoded text."""


class TokenTexts:
    """Cuts responses into the texts of their tokens. A special token's text is its name, such as ``<|im_end|>``."""

    def __init__(self, folder: Path) -> None:
        """Load an HF folder's tokenizer.json. Raises FileNotFoundError without it, ValueError if it is no tokenizer."""
        path = folder / TOKENIZER
        if not path.is_file():
            raise FileNotFoundError(f"no {TOKENIZER} in {folder}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"{path}: not a tokenizer: {error}") from error
        self._decode = lru_cache(1 << 16)(lambda *ids: tokenizer.decode(ids, skip_special_tokens=False))
        self._after = lru_cache(1 << 16)(lambda before, *ids: self._decode(*before, *ids)[len(self._decode(*before)) :])

    def cut(self, token_ids: Sequence[int]) -> tuple[str, NDArray[np.uint16]]:
        """Return a response's text, and the lengths [n] of its tokens' texts in UTF-16 units, as browsers count them.

        A character whose bytes several tokens share belongs to the last of these tokens; the others have length 0.
        Bytes that are not UTF-8 become U+FFFD.
        """
        texts: list[str] = []
        first = 0  # index of the first token without text
        for place in range(len(token_ids)):
            before = tuple(token_ids[max(first - 1, 0) : first])  # some drop a space at the beginning of a text
            text = self._after(before, *token_ids[first : place + 1])
            if text.endswith(_BROKEN) and place + 1 < min(first + _LONGEST, len(token_ids)):
                texts.append("")
                continue
            texts.append(text)
            first = place + 1
        return "".join(texts), np.array([len(text.encode("utf-16-le")) // 2 for text in texts], dtype=np.uint16)


def packets(files: Sequence[Path], rows: pd.DataFrame, tokens: TokenTexts | None) -> dict[int, bytes]:
    """Return, by row index, the packets of the responses in ``rows``, which ``web/response.js`` reads."""
    columns = [*_TEXTS, "response_token_ids", *_TOKENS]
    packed: dict[int, bytes] = {}
    for number, of_file in rows.groupby("file"):
        first = 0
        with open_rollouts(files[number]) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                here = of_file["place"][of_file["place"].between(first, first + batch.num_rows - 1)]
                records = batch.take(pa.array(here - first)).to_pylist()
                packed.update(
                    (index, _packed(record, tokens)) for index, record in zip(here.index, records, strict=True)
                )
                first += batch.num_rows
    return packed


def _packed(record: dict[str, Any], tokens: TokenTexts | None) -> bytes:
    header = {name: record[name] for name in _TEXTS}
    columns: dict[str, NDArray[Any]] = {}
    if tokens is not None:
        header["response"], columns["units"] = tokens.cut(record["response_token_ids"])
    columns |= {
        short: np.array(record[name], np.float32) for name, short in _TOKENS.items() if record[name] is not None
    }
    return packet(header, columns)
