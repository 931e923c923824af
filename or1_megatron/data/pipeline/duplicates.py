"""Excludes exact and near-duplicate problems (MinHash), within a set and across sets: the first occurrence stays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from or1_megatron.config.schema import Section
from or1_megatron.data.pipeline.recipe import DuplicatesConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome, read_columns
from or1_megatron.data.pipeline.steps import PipelineStep
from or1_megatron.data.pipeline.text import (
    UInt64Array,
    band_keys,
    comparable,
    decisive,
    jaccard,
    plain,
    shingles,
    signatures,
    text_key,
)
from or1_megatron.types import BoolArray

_SHINGLE_CHARS = 5
_BANDS, _COLUMNS_PER_BAND = 32, 3
"""MinHash bands: texts of Jaccard similarity 0.5 agree in some band with probability 1 - (1 - 0.5^3)^32 = 0.986."""
_BATCH_ROWS = 2048
_CACHED_SETS = 1 << 14
_MOST_COMPARED = 8  # earlier problems that one is compared with; without a limit, N from one template cost N^2

Repeats = Mapping[int, tuple[int, float]]
"""Maps a repeated problem's number to (number of the earlier problem that it repeats, similarity)."""


class DuplicateStep[C: Section](PipelineStep[C]):
    """Base of the steps that exclude repeated problems; a subclass finds them in ``_find``.

    ``within``: compare only problems of the same set; the step's name then ends in ``_within``.
    """

    reason: str

    def __init__(self, config: C, within: bool = False) -> None:
        super().__init__(config)
        self._kinds = ("ability", "set_name") if within else ("ability",)
        if within:
            self.name = f"{self.name}_within"
        self._repeats: Repeats = {}
        self._originals: dict[int, tuple[str, ...]] = {}

    def prepare(self, shards: Sequence[Path]) -> None:
        self._repeats = self._find(shards)
        wanted = {original for original, _ in self._repeats.values()}
        columns = ("id", "source", "origin", "ground_truth", "set_name")
        self._originals = {row: values for row, values in numbered(shards, columns) if row in wanted}

    def _find(self, shards: Sequence[Path]) -> Repeats:
        raise NotImplementedError

    def decide(self, row: Candidate, number: int) -> Outcome:
        if number not in self._repeats:
            return row
        at, similarity = self._repeats[number]
        id_, source, origin, ground_truth, set_name = self._originals[at]
        evidence = {
            "of": id_,
            "of_origin": origin,
            "of_source": source,
            "similarity": round(similarity, 4),
            "scope": "within" if set_name == row.set_name else "across",
            "same_answer": ground_truth == row.ground_truth,
        }
        return Exclusion(row, self.reason, evidence)


class ExactDuplicates(DuplicateStep[Section]):
    """Excludes problems whose statements are equal once formatting, numbering and white space are removed."""

    name = "exact_duplicates"
    reason = "exact_duplicate"

    def __init__(self, within: bool = False) -> None:
        super().__init__(Section(), within)

    def _find(self, shards: Sequence[Path]) -> Repeats:
        first_of: dict[tuple[int | str, ...], int] = {}
        repeats = {}
        for row, (statement, *kinds) in numbered(shards, ("statement", *self._kinds)):
            first = first_of.setdefault((text_key(plain(statement) or statement), *kinds), row)
            if first != row:
                repeats[row] = (first, 1.0)
        return repeats


class NearDuplicates(DuplicateStep[DuplicatesConfig]):
    """Excludes near-duplicates: MinHash finds likely pairs, and the Jaccard similarity of their shingles decides.

    Statements that differ in a number, or in a word that decides the meaning (largest, smallest, odd, even, ...), are
    never duplicates. A problem is compared only with problems that stay. So if A is like B and B is like C, but A is
    not like C, then A and C stay.
    """

    name = "near_duplicates"
    reason = "near_duplicate"
    without_effect = frozenset({"embedding"})

    def _find(self, shards: Sequence[Path]) -> Repeats:
        """Compare each problem with earlier problems that share a band key; keep only their statements in memory."""
        columns = ("statement", *self._kinds)
        keys = np.concatenate([_keys(*batch) for batch in read_columns(shards, columns, _BATCH_ROWS)])
        shared = np.stack([_occurs_again(band) for band in keys.T], axis=1)
        staying: dict[int, list[int]] = defaultdict(list)  # by key
        texts: dict[int, str] = {}  # of rows that stay
        earlier = lru_cache(_CACHED_SETS)(lambda other: shingles(texts[other], _SHINGLE_CHARS))
        repeats: dict[int, tuple[int, float]] = {}
        for row, (statement,) in numbered(shards, ("statement",)):
            own = keys[row, shared[row]].tolist()
            if not own:
                continue
            text = comparable(statement) or statement
            together = Counter(other for key in own for other in staying[key])
            likely = sorted(together, key=lambda other: (-together[other], other))[:_MOST_COMPARED]
            mine = shingles(text, _SHINGLE_CHARS)
            alike = {other: jaccard(mine, earlier(other)) for other in likely}
            best = max(alike, key=lambda other: alike[other], default=row)
            if alike.get(best, 0.0) >= self._config.threshold:
                repeats[row] = (best, alike[best])
                continue
            texts[row] = text
            for key in own:
                staying[key].append(row)
        return repeats


def _keys(statements: Sequence[str], *kinds: Sequence[str]) -> UInt64Array:
    """Return MinHash band keys [problems, bands]; problems of different ``kinds`` (ability, set) share no key."""
    texts = [comparable(text) or text for text in statements]
    signed = signatures(texts, _SHINGLE_CHARS, _BANDS * _COLUMNS_PER_BAND)
    guarded = ("\0".join((*decisive(text), *kind)) for text, kind in zip(texts, zip(*kinds, strict=True), strict=True))
    return band_keys(signed, _BANDS, np.array([text_key(text) for text in guarded], dtype=np.uint64))


def _occurs_again(band: UInt64Array) -> BoolArray:
    """Return a mask [problems]: True where another problem has the same key in this band."""
    _, place, counts = np.unique(band, return_inverse=True, return_counts=True)
    return counts[place] > 1


def numbered(shards: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (number, values of the named columns) for each candidate that is not excluded; numbers start at 0."""
    rows = (values for batch in read_columns(shards, columns) for values in zip(*batch, strict=True))
    return enumerate(rows)
