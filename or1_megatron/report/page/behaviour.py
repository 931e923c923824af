"""Measures what a step's responses are like: repetition, other scripts, checking words, changed answers, entropy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from or1_megatron.report.page.responses import TokenTexts
from or1_megatron.report.page.rollout_table import BATCH_ROWS
from or1_megatron.runtime.rollout_store import open_rollouts
from or1_verify.answer import is_answered_once

TAIL, NGRAM, LEAST_TOKENS, TENTHS = 200, 8, 24, 10
"""Repetition shows in the n-grams (n = NGRAM) of a response's last TAIL tokens; responses of fewer than LEAST_TOKENS
tokens do not count as repeating. Entropy is measured in TENTHS parts of a response."""
KINDS: Final = {
    "space": r"\s*",
    "digit": r"\s*\d.*",
    "CJK": r"\s*[\u3040-\u9fff\uac00-\ud7a3].*",
    "word": r"\s*[^\W\d_].*",
    "operator": r"\s*[-+*/=<>^%×÷·≤≥≠≈±−→]\W*",
    "other": ".*",
}
"""Kinds of tokens, as regular expressions. A token is of the first kind that matches its text. ``other``: punctuation,
LaTeX, special tokens."""
_CHECKING: Final = (
    r"\b(wait|hmm+|alternatively|(double[- ]|re-?)?check(ing)? (again|this|that|it|the|my)|verify(ing)?|"
    r"on second thought|let me (double[- ]|re-?)?(check|think again))\b|等等|等一下|验证|检查|检验|核对|另一种|重新"
)
_SCRIPTS: Final = (
    {*range(0x41, 0x5B), *range(0x61, 0x7B), *range(0xC3, 0xCA)},
    *(set(range(first, last + 1)) for first, last in ((0xD0, 0xD4), (0xD6, 0xDB), (0xE0, 0xE0), (0xE3, 0xED))),
)
"""First UTF-8 bytes of letters: Latin; Cyrillic; Hebrew and Arabic; South Asian; CJK. Greek counts as mathematics."""
_LETTERS: Final = np.array([[(byte in of) * (3 if 0xE3 in of else 1) for of in _SCRIPTS] for byte in range(256)])
_COLUMNS: Final = ("step", "prompt", "response", "response_token_ids", "log_probs", "status", "truncated")


def measure(files: Sequence[Path], tokens: TokenTexts | None) -> dict[int, dict[str, float]]:
    """Return means over the responses of each step in rollout files, by step and name. Means of nothing are left out.

    length/right, length/wrong and length/truncated are in tokens. The following are shares of responses: truncated;
    repeats (fewer than half of the n-grams in the tail are distinct); changed (the response boxes different answers).
    other_script is the share of letters outside the prompt's script; a CJK character counts as three letters. checks
    counts checking words ("wait", "verify", ...) per 1,000 tokens. entropy/tenth/* (by tenth of the response, from 0)
    and entropy/kind/* (by kind of token, ``KINDS``) are minus the engine's log-prob, in nats per token.
    """
    texts = cache(lambda token: "?" if tokens is None else tokens.cut([token])[0])
    kind = cache(lambda token: next(i for i, of in enumerate(KINDS.values()) if re.fullmatch(of, texts(token), re.S)))
    found: dict[int, dict[str, NDArray[np.float64]]] = {}
    for path in files:
        with open_rollouts(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=list(_COLUMNS)):
                sums = found.setdefault(batch["step"][0].as_py(), {})
                for name, *both in (*_responses(batch), *_entropies(batch, kind)):
                    sums[name] = sums.get(name, 0) + np.array(both, np.float64)
    return {step: {name: float(f"{x / n:.6g}") for name, (x, n) in of.items() if n} for step, of in found.items()}


def _responses(batch: pa.RecordBatch) -> Iterator[tuple[str, float, float]]:
    """Yield (name of a mean, sum, number of summed values)."""
    texts, ids, rows = batch["response"], batch["response_token_ids"].to_numpy(zero_copy_only=False), batch.num_rows
    tokens, cut = pc.list_value_length(batch["log_probs"]).to_numpy(), batch["truncated"].to_numpy(zero_copy_only=False)
    right = pc.equal(batch["status"], "right").to_numpy(zero_copy_only=False)
    for name, which in {"right": right, "wrong": ~right & ~cut, "truncated": ~right & cut}.items():
        yield f"length/{name}", tokens[which].sum(), which.sum()
    yield "truncated", cut.sum(), rows
    yield "repeats", sum(map(_loops, ids)), rows
    boxes = pc.count_substring(texts, "boxed").to_numpy()
    several = (str(text) for text, n in zip(texts, boxes, strict=True) if n > 1)
    yield "changed", sum(not is_answered_once(text[text.index("boxed") - 1 :]) for text in several), rows
    yield "checks", 1000 * pc.sum(pc.count_substring_regex(texts, _CHECKING, ignore_case=True)).as_py(), tokens.sum()
    prompts = batch["prompt"].dictionary_encode()
    own, letters = _letters(prompts.dictionary).argmax(axis=1)[prompts.indices.to_numpy()], _letters(texts)
    total = letters.sum(axis=1)
    yield "other_script", ((total - letters[np.arange(rows), own]) / np.maximum(total, 1)).sum(), (total > 0).sum()


def _loops(ids: NDArray[np.int32]) -> bool:
    tail, width = ids[-TAIL:].tobytes(), NGRAM * ids.itemsize
    ngrams = [tail[at : at + width] for at in range(0, len(tail) - width + 1, ids.itemsize)]
    return len(ids) >= LEAST_TOKENS and 2 * len(set(ngrams)) < len(ngrams)


def _letters(texts: pa.StringArray) -> NDArray[np.int64]:
    """Return the number of letters of each script in each text, [n, scripts]. To save time, an ASCII text, whose
    letters are all Latin, counts as one letter if it has any letter."""
    counts = np.zeros((len(texts), 256), np.int64)
    counts[:, ord("a")] = pc.match_substring_regex(texts, "[A-Za-z]").to_numpy(zero_copy_only=False)
    for i in np.flatnonzero(~pc.string_is_ascii(texts).to_numpy(zero_copy_only=False)).tolist():
        counts[i] = np.bincount(np.frombuffer(texts[i].as_buffer(), np.uint8), minlength=256)
    return counts @ _LETTERS


def _entropies(batch: pa.RecordBatch, kind: Callable[[int], int]) -> Iterator[tuple[str, float, float]]:
    """Yield (name of a mean, sum over tokens, number of tokens)."""
    values = np.nan_to_num(batch["log_probs"].flatten().to_numpy(), neginf=0.0)
    ends = batch["log_probs"].offsets.to_numpy()
    bounds = ends[:-1, None] - ends[0] - (-np.diff(ends)[:, None] * np.arange(TENTHS + 1) // TENTHS)
    sums = np.diff(np.append(0.0, np.cumsum(values, dtype=np.float64))[bounds]).sum(axis=0)
    yield from zip((f"entropy/tenth/{i}" for i in range(TENTHS)), -sums, np.diff(bounds).sum(axis=0), strict=True)
    ids = batch["response_token_ids"].flatten().to_numpy()
    counts, sums = np.bincount(ids), np.bincount(ids, weights=values)
    seen = np.flatnonzero(counts)
    kinds = np.array([kind(token) for token in seen.tolist()], np.int64)
    for i, name in enumerate(KINDS):
        yield f"entropy/kind/{name}", -sums[seen[kinds == i]].sum(), counts[seen[kinds == i]].sum()
