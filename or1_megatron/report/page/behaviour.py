"""Measures what responses are like: loops, other scripts, checking words, changed answers, surprise by token."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from or1_megatron.report.page.responses import TokenTexts
from or1_megatron.report.page.rollout_table import BATCH_ROWS
from or1_megatron.runtime.rollout_store import HELD_OUT, SCHEMA, open_rollouts
from or1_verify.answer import is_answered_once

TAIL, NGRAM, LEAST_TOKENS, TENTHS = 200, 8, 24, 10
"""A loop is searched in the last TAIL tokens of responses of at least LEAST_TOKENS tokens."""
KINDS: Final = {
    "space": r"\s*",
    "digit": r"\s*\d.*",
    "CJK": r"\s*[\u3040-\u9fff\uac00-\ud7a3].*",
    "word": r"\s*[^\W\d_].*",
    "operator": r"\s*[-+*/=<>^%×÷·≤≥≠≈±−→]\W*",
    "other": ".*",
}
"""Kinds of tokens and their texts; the first that fits counts. ``other``: punctuation, LaTeX commands, ...."""
_CHECKING: Final = (
    r"\b(wait|hmm+|alternatively|(double[- ]|re-?)?check(ing)? (again|this|that|it|the|my)|verify(ing)?|"
    r"on second thought|let me (double[- ]|re-?)?(check|think again))\b|等等|等一下|验证|检查|检验|核对|换一?[个种]|另一种|重新"
)
_SCRIPTS: Final = (
    {*range(0x41, 0x5B), *range(0x61, 0x7B), *range(0xC3, 0xCA)},
    *(set(range(first, last + 1)) for first, last in ((0xD0, 0xD4), (0xD6, 0xDB), (0xE0, 0xE0), (0xE3, 0xED))),
)
"""First UTF-8 bytes of letters: Latin; Cyrillic; Hebrew and Arabic; South Asian; CJK. Greek is mathematics."""
_WEIGHTS: Final = np.array(
    [[(byte in script) * (3 if 0xE3 in script else 1) for script in _SCRIPTS] for byte in range(256)]
)
_MIX: Final = np.cumprod(np.full(NGRAM, 6364136223846793005, np.int64))


def measure(
    files: Sequence[Path], rows: pd.DataFrame, tokens: TokenTexts | None
) -> tuple[pd.DataFrame, dict[int, list[list[float]]]]:
    """Measure the responses of one run: ``rows``, its table of ``files`` (``rollout_table.read_table``).

    Returns a table by the index of ``rows``: repeats (fewer than half of the n-grams of its tail are distinct), changed
    (its boxes have different answers), other_script (share of letters not of the prompt's script; a character of CJK
    counts as three), checks (number of checking words). And by training step [sums of minus the engine's log-prob
    (nats), numbers of tokens] of each tenth of the responses and of each of KINDS, [2][TENTHS + len(KINDS)].
    """
    kind = cache(lambda token: _kind("" if tokens is None else tokens.cut([token])[0]))
    parts = [_responses(pa.RecordBatch.from_pylist([], schema=SCHEMA))]
    sums: defaultdict[int, NDArray[np.float64]] = defaultdict(lambda: np.zeros((2, TENTHS + len(KINDS))))
    for number, of_file in rows.groupby("file"):
        step = -1 if of_file["stage"].iloc[0] == HELD_OUT else int(of_file["step"].iloc[0])
        with open_rollouts(files[number]) as file:
            columns = ["prompt", "response", "response_token_ids", "log_probs"]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                parts.append(_responses(batch))
                sums[step] += _surprise(batch, kind)
    return pd.concat(parts).set_axis(rows.index), {step: both.tolist() for step, both in sums.items() if step >= 0}


def _responses(batch: pa.RecordBatch) -> pd.DataFrame:
    texts, ids = batch["response"], batch["response_token_ids"].to_numpy(zero_copy_only=False)
    prompts = batch["prompt"].dictionary_encode()
    letters, own = _letters(texts), np.argmax(_letters(prompts.dictionary), axis=1)[prompts.indices.to_numpy()]
    total, boxes = letters.sum(axis=1), pc.count_substring(texts, "boxed").to_numpy()
    several = (str(text) if n > 1 else "" for text, n in zip(texts, boxes, strict=True))
    changed = [not is_answered_once(text[max(0, text.find("boxed") - 1) :]) for text in several]
    return pd.DataFrame(
        {
            "repeats": np.array([_loops(each[-TAIL:]) for each in ids], np.bool_),
            "changed": np.array(changed, np.bool_),
            "other_script": (total - letters[np.arange(len(own)), own]) / np.maximum(total, 1),
            "checks": pc.count_substring_regex(texts, _CHECKING, ignore_case=True).to_numpy(),
        }
    )


def _loops(tail: NDArray[np.int32]) -> bool:
    if len(tail) < LEAST_TOKENS:
        return False
    ngrams = sliding_window_view(tail.astype(np.int64), NGRAM) @ _MIX  # a number for each
    return 2 * len(np.unique(ngrams)) < len(ngrams)


def _letters(texts: pa.StringArray) -> NDArray[np.int64]:
    """Return the number of letters of each script in each text, [n, scripts], weighted."""
    counts = [np.bincount(np.frombuffer(text.as_buffer(), np.uint8), minlength=256) for text in texts]
    return np.array(counts, np.int64).reshape(-1, 256) @ _WEIGHTS


def _surprise(batch: pa.RecordBatch, kind: Callable[[int], int]) -> NDArray[np.float64]:
    values = np.nan_to_num(-batch["log_probs"].flatten().to_numpy().astype(np.float64), posinf=0.0)
    lengths = pc.list_value_length(batch["log_probs"]).to_numpy()
    place = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    ids = batch["response_token_ids"].flatten().to_numpy()
    seen = np.flatnonzero(np.bincount(ids))
    kinds = np.zeros(1 + seen.max(initial=0), np.int64)
    kinds[seen] = [kind(token) for token in seen.tolist()]
    both = (place * TENTHS // np.repeat(lengths, lengths), TENTHS), (kinds[ids], len(KINDS))
    sums = [np.concatenate([np.bincount(at, of, minlength=n) for at, n in both]) for of in (values, None)]
    return np.stack(sums)


def _kind(text: str) -> int:
    return next(i for i, pattern in enumerate(KINDS.values()) if re.fullmatch(pattern, text, re.DOTALL))
