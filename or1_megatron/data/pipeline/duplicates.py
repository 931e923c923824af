"""Duplicates within a set and across the sets: the first one, in the order of the sources, stays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from or1_megatron.config.schema import Section
from or1_megatron.data.pipeline.recipe import DuplicatesConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome, read_column
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

_TEXT_BYTES = 256 << 20  # statements compared at once
_BATCH_ROWS = 2048
_MOST_COMPARED = 8  # rows that one is compared with, those that share most bands; else templates would be quadratic


class Original(NamedTuple):
    """A row that stays, as the evidence names it."""

    id: str
    source: str
    origin: str
    ground_truth: str
    set_name: str


class DuplicateStep[C: Section](PipelineStep[C]):
    """Base of the duplicate steps: ``_find`` says which row repeats which, ``apply`` excludes them.

    ``within``: compare only rows of one set, in a step of its own.
    """

    code = ("data/pipeline/duplicates.py", "data/pipeline/text.py")
    reason: str
    _original_of: dict[int, tuple[int, float]]
    _originals: dict[int, Original]

    def __init__(self, config: C, within: bool = False) -> None:
        super().__init__(config)
        self._kinds = ("ability", "set_name") if within else ("ability",)
        if within:
            self.name = f"{self.name}_within"

    def prepare(self, shards: Sequence[Path]) -> None:
        self._original_of = self._find(shards)
        wanted = {original for original, _ in self._original_of.values()}
        columns = ("id", "source", "origin", "ground_truth", "set_name")
        self._originals = {row: Original(*values) for row, values in _numbered(shards, columns) if row in wanted}

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        return [self._judged(row, number) for number, row in enumerate(rows, start=first)]

    def close(self) -> None:
        self._original_of, self._originals = {}, {}

    def _find(self, shards: Sequence[Path]) -> dict[int, tuple[int, float]]:
        """Return row -> (the earlier row that it repeats, similarity)."""
        raise NotImplementedError

    def _judged(self, row: Candidate, number: int) -> Outcome:
        if number not in self._original_of:
            return row
        at, similarity = self._original_of[number]
        original = self._originals[at]
        evidence = {
            "of": original.id,
            "of_origin": original.origin,
            "of_source": original.source,
            "similarity": round(similarity, 4),
            "scope": "within" if original.set_name == row.set_name else "across",
            "same_answer": original.ground_truth == row.ground_truth,
        }
        return Exclusion(row, self.reason, evidence)


class ExactDuplicates(DuplicateStep[Section]):
    """Statements that are equal once formatting, numbering and white space are taken off."""

    name = "exact_duplicates"
    reason = "exact_duplicate"

    def __init__(self, within: bool = False) -> None:
        super().__init__(Section(), within)

    def _find(self, shards: Sequence[Path]) -> dict[int, tuple[int, float]]:
        found = []
        for shard in shards:
            for statements, *kinds in read_column(shard, ("statement", *self._kinds), _BATCH_ROWS):
                keys = [text_key(plain(text) or text) for text in statements]
                found.append(np.array(keys, dtype=np.uint64) ^ _of_kinds(kinds))
        keys = np.concatenate(found)
        return {row: (original, 1.0) for original, row in _equal_pairs(keys)}


class NearDuplicates(DuplicateStep[DuplicatesConfig]):
    """MinHash finds rows that may be alike; the Jaccard similarity of their shingles decides.

    Two statements with other numbers, or other words of those that turn a meaning (largest, smallest, odd, even, ...),
    are different problems however alike they look. A row is compared with rows that stay, so of a chain of ever less
    similar rows the ends may both stay.
    """

    name = "near_duplicates"
    reason = "near_duplicate"
    without_effect = frozenset({"embedding"})

    def _find(self, shards: Sequence[Path]) -> dict[int, tuple[int, float]]:
        columns = ("statement", *self._kinds)
        batches = (batch for shard in shards for batch in read_column(shard, columns, _BATCH_ROWS))
        keys = np.concatenate([self._keys(*batch) for batch in batches])
        groups = _groups(keys)
        original_of: dict[int, tuple[int, float]] = {}
        for members in _parts(groups, _lengths(shards), _TEXT_BYTES):
            wanted = {row for group in members for row in group}
            texts = {
                row: comparable(text) or text for row, (text,) in _numbered(shards, ("statement",)) if row in wanted
            }
            for group in members:
                self._compare(group, texts, keys, original_of)
        return original_of

    def _keys(self, statements: Sequence[str], *kinds: Sequence[str]) -> UInt64Array:
        """Band keys [rows, bands]."""
        config = self._config
        texts = [comparable(text) or text for text in statements]
        found = signatures(texts, config.shingle_chars, config.bands * config.rows_per_band)
        guards = np.array([_short_hash("\0".join(decisive(text))) for text in texts], dtype=np.uint64)
        return band_keys(found, config.bands, guards ^ _of_kinds(kinds))

    def _compare(
        self,
        group: Sequence[int],
        texts: Mapping[int, str],
        keys: UInt64Array,
        original_of: dict[int, tuple[int, float]],
    ) -> None:
        own = keys[np.array(group)]
        stays = np.zeros(len(group), dtype=bool)
        sets: dict[int, UInt64Array] = {}
        for place, row in enumerate(group):
            shared = (own[:place] == own[place]).sum(axis=1) * stays[:place]
            likely = np.argsort(-shared, kind="stable")[:_MOST_COMPARED]
            mine = shingles(texts[row], self._config.shingle_chars)
            best = (-1, 0.0)
            for other in likely[shared[likely] > 0].tolist():
                similarity = jaccard(mine, sets[other])
                if similarity > best[1]:
                    best = (group[other], similarity)
            if best[1] >= self._config.threshold:
                original_of[row] = best
            else:
                stays[place] = True
                sets[place] = mine


def _short_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _of_kinds(columns: Sequence[Sequence[str]]) -> UInt64Array:
    """A hash per row of its ability, and of its set where it counts: a math and a code problem are never the same."""
    kinds = list(zip(*columns, strict=True))
    known = {kind: _short_hash("\0".join(kind)) for kind in set(kinds)}
    return np.array([known[kind] for kind in kinds], dtype=np.uint64)


def _equal_pairs(keys: UInt64Array) -> Iterator[tuple[int, int]]:
    """Yield (first row of a key, later row of the same key)."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    first_of = np.repeat(order[starts], np.diff(np.append(starts, len(order))))
    later = np.flatnonzero(first_of != order)
    return zip(first_of[later].tolist(), order[later].tolist(), strict=True)


def _groups(keys: UInt64Array) -> list[NDArray[np.int64]]:
    """Return groups of rows that share keys, directly or through others: each in order, of two rows at least."""
    rows = len(keys)
    ends = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
    for band in range(keys.shape[1]):
        order = np.argsort(keys[:, band], kind="stable")
        same = np.flatnonzero(keys[order[1:], band] == keys[order[:-1], band])
        ends.append((order[same], order[same + 1]))
    one = np.concatenate([pair[0] for pair in ends])
    other = np.concatenate([pair[1] for pair in ends])
    label = np.arange(rows)
    while True:  # every row takes the smallest label in reach until nothing changes
        lowest = np.minimum(label[one], label[other])
        after = label.copy()
        np.minimum.at(after, one, lowest)
        np.minimum.at(after, other, lowest)
        after = after[after]
        if np.array_equal(after, label):
            break
        label = after
    linked = np.unique(np.concatenate((one, other)))
    order = linked[np.lexsort((linked, label[linked]))]
    if not len(order):
        return []
    cuts = np.flatnonzero(label[order][1:] != label[order][:-1]) + 1
    return [np.sort(group) for group in np.split(order, cuts)]


def _parts(groups: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64], limit: int) -> Iterator[list[list[int]]]:
    """Yield the groups in portions whose statements fit into ``limit`` bytes (one group at least)."""
    portion: list[list[int]] = []
    size = 0
    for group in groups:
        weight = int(lengths[group].sum())
        if portion and size + weight > limit:
            yield portion
            portion, size = [], 0
        portion.append(group.tolist())
        size += weight
    if portion:
        yield portion


def _lengths(shards: Sequence[Path]) -> NDArray[np.int64]:
    """Return the number of characters of each statement."""
    found = [
        np.fromiter((len(text) for text in texts), dtype=np.int64)
        for shard in shards
        for (texts,) in read_column(shard, ("statement",))
    ]
    return np.concatenate(found)


def _numbered(shards: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield (number among all rows, the named columns) of every row."""
    number = 0
    for shard in shards:
        for batch in read_column(shard, columns):
            for values in zip(*batch, strict=True):
                yield number, values
                number += 1
