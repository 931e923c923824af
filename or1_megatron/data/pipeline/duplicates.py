"""Duplicates within a set and across sets: the first row, in the order of the sources, stays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
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

_SHINGLE_CHARS = 5
_BANDS, _COLUMNS_PER_BAND = 32, 3
"""Two texts of Jaccard similarity 0.5 agree in some band with probability 1 - (1 - 0.5^3)^32 = 0.986."""
_BATCH_ROWS = 2048
_MOST_COMPARED = 8  # rows that a row is compared with; unlimited, N rows of one template would cost N^2

Repeats = Mapping[int, tuple[int, float]]
"""Row -> (the earlier row that it repeats, similarity)."""


class DuplicateStep[C: Section](PipelineStep[C]):
    """Base of the duplicate steps: ``_find`` finds the rows that repeat an earlier row, ``apply`` excludes them.

    ``within``: compare only rows of the same set; the step's name says so.
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

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        return [self._judged(row, number) for number, row in enumerate(rows, start=first)]

    def _find(self, shards: Sequence[Path]) -> Repeats:
        raise NotImplementedError

    def _judged(self, row: Candidate, number: int) -> Outcome:
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
    """Statements that are equal once formatting, numbering and white space are removed."""

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
    """MinHash finds rows that may be alike; the Jaccard similarity of their shingles decides.

    Two statements that differ in a number, or in a word that decides the meaning (largest, smallest, odd, even, ...),
    are different problems however alike they look. A row is compared only with rows that stay, so in a chain of similar
    rows both ends may stay.
    """

    name = "near_duplicates"
    reason = "near_duplicate"
    without_effect = frozenset({"embedding"})

    def _find(self, shards: Sequence[Path]) -> Repeats:
        """Compare the rows of each group of likely duplicates; only their statements are held in memory."""
        columns = ("statement", *self._kinds)
        keys = np.concatenate([_keys(*batch) for batch in read_columns(shards, columns, _BATCH_ROWS)])
        groups = _groups(keys)
        wanted = {row for group in groups for row in group}
        texts = {row: comparable(text) or text for row, (text,) in numbered(shards, ("statement",)) if row in wanted}
        repeats: dict[int, tuple[int, float]] = {}
        for group in groups:
            self._compare(group, texts, keys, repeats)
        return repeats

    def _compare(
        self,
        group: Sequence[int],
        texts: Mapping[int, str],
        keys: UInt64Array,
        repeats: dict[int, tuple[int, float]],
    ) -> None:
        own = keys[np.array(group)]
        stays = np.zeros(len(group), dtype=bool)
        sets: dict[int, UInt64Array] = {}
        for index, row in enumerate(group):
            shared = (own[:index] == own[index]).sum(axis=1) * stays[:index]
            likely = np.argsort(-shared, kind="stable")[:_MOST_COMPARED]
            mine = shingles(texts[row], _SHINGLE_CHARS)
            best = (-1, 0.0)
            for other in likely[shared[likely] > 0].tolist():
                similarity = jaccard(mine, sets[other])
                if similarity > best[1]:
                    best = (group[other], similarity)
            if best[1] >= self._config.threshold:
                repeats[row] = best
            else:
                stays[index] = True
                sets[index] = mine


def _keys(statements: Sequence[str], *kinds: Sequence[str]) -> UInt64Array:
    """Return band keys [rows, bands]. Rows of different kinds share no key: no math problem equals a code problem."""
    texts = [comparable(text) or text for text in statements]
    signed = signatures(texts, _SHINGLE_CHARS, _BANDS * _COLUMNS_PER_BAND)
    guarded = ("\0".join((*decisive(text), *kind)) for text, kind in zip(texts, zip(*kinds, strict=True), strict=True))
    return band_keys(signed, _BANDS, np.array([_short_hash(text) for text in guarded], dtype=np.uint64))


def _short_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _groups(keys: UInt64Array) -> list[list[int]]:
    """Return the groups of two or more rows that share keys, directly or through other rows; each is sorted."""
    above: dict[int, int] = {}  # row -> an earlier row of its group

    def first(row: int) -> int:
        while (earlier := above.setdefault(row, row)) != row:
            above[row] = row = above.setdefault(earlier, earlier)
        return row

    for band in range(keys.shape[1]):
        order = np.argsort(keys[:, band], kind="stable")
        same = np.flatnonzero(keys[order[1:], band] == keys[order[:-1], band])
        for one, other in zip(order[same].tolist(), order[same + 1].tolist(), strict=True):
            ends = sorted((first(one), first(other)))
            above[ends[1]] = ends[0]
    groups: dict[int, list[int]] = {}
    for row in sorted(above):
        groups.setdefault(first(row), []).append(row)
    return list(groups.values())


def numbered(shards: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (number from 0, the named columns) of each row that no step has dropped."""
    rows = (values for batch in read_columns(shards, columns) for values in zip(*batch, strict=True))
    return enumerate(rows)
