"""Decontamination: exclude problems of the given evaluation sets, whole or in large part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from or1_megatron.data.pipeline.normalise import published_rows, source_digest
from or1_megatron.data.pipeline.recipe import DecontaminationConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.steps import PipelineStep
from or1_megatron.data.pipeline.text import comparable, ngram_hashes, text_key, words
from or1_verify.problems.rows import RowError
from or1_verify.problems.unusable import UnusableRows


@dataclass(frozen=True)
class _Evaluated:
    """A problem of an evaluation set."""

    origin: str
    statement: str
    grams: frozenset[int]


class Decontamination(PipelineStep[DecontaminationConfig]):
    """Matches equal normalised texts, and texts that share enough of the n-grams of the shorter one.

    The shorter text counts, so that a problem is found inside a longer statement, and a part of a problem too.
    """

    name = "decontaminate"
    code = ("data/pipeline/contamination.py", "data/pipeline/text.py", "or1_verify/problems/layouts.py")

    def __init__(self, config: DecontaminationConfig, unusable: Path) -> None:
        """``unusable``: the file that lists the rows of the evaluation sets that cannot be used, if there are many."""
        super().__init__(config)
        self._unusable = unusable
        self._evaluated: list[_Evaluated] = []
        self._whole: dict[int, int] = {}
        self._owners: dict[int, tuple[int, ...]] = {}
        self._grams = np.empty(0, dtype=np.uint64)

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "digests": [source_digest(source) for source in self._config.against]}

    def prepare(self, shards: Sequence[Path]) -> None:
        owners: dict[int, list[int]] = {}
        faults = UnusableRows()
        for source in self._config.against:
            for origin, row in published_rows(source):
                if isinstance(row, RowError):
                    faults.add(row)
                    continue
                text = comparable(row.statement)
                grams, _ = ngram_hashes([words(text)], self._config.ngram_words)
                index = len(self._evaluated)
                self._evaluated.append(_Evaluated(origin, row.statement, frozenset(grams.tolist())))
                self._whole.setdefault(text_key(text), index)
                for gram in self._evaluated[-1].grams:
                    owners.setdefault(gram, []).append(index)
        faults.refuse(self._unusable)  # a problem that is left out here would not be found in the training set
        self._owners = {gram: tuple(indices) for gram, indices in owners.items()}
        self._grams = np.sort(np.fromiter(owners, dtype=np.uint64, count=len(owners)))

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        if not self._evaluated:
            return list(rows)
        texts = [comparable(row.statement) for row in rows]
        grams, row_of = ngram_hashes([words(text) for text in texts], self._config.ngram_words)
        at = np.minimum(np.searchsorted(self._grams, grams), max(len(self._grams) - 1, 0))
        hit = self._grams[at] == grams if len(self._grams) else np.zeros(len(grams), dtype=bool)
        shared = set(row_of[hit].tolist())
        counts = np.searchsorted(row_of, np.arange(len(rows) + 1))
        outcomes: list[Outcome] = []
        for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
            evidence = self._equal(text)
            if evidence is None and number in shared:
                evidence = self._overlapping(frozenset(grams[counts[number] : counts[number + 1]].tolist()))
            outcomes.append(row if evidence is None else Exclusion(row, "contaminated", evidence))
        return outcomes

    def close(self) -> None:
        self._evaluated, self._whole, self._owners = [], {}, {}

    def _equal(self, text: str) -> dict[str, Any] | None:
        index = self._whole.get(text_key(text))
        return None if index is None else {"match": "normalised text", **self._named(index)}

    def _overlapping(self, grams: frozenset[int]) -> dict[str, Any] | None:
        """Return the evaluation problem with the largest shared part, if that is large enough."""
        counts = Counter(owner for gram in grams for owner in self._owners.get(gram, ()))
        best, share = -1, 0.0
        for owner, count in counts.items():
            part = count / min(len(grams), len(self._evaluated[owner].grams))
            if (part, -owner) > (share, -best):
                best, share = owner, part
        if share < self._config.overlap:
            return None
        return {
            "match": f"{self._config.ngram_words}-grams",
            "overlap": round(share, 4),
            "shared_ngrams": counts[best],
            **self._named(best),
        }

    def _named(self, index: int) -> dict[str, Any]:
        return {"of_origin": self._evaluated[index].origin, "of_statement": self._evaluated[index].statement[:200]}
