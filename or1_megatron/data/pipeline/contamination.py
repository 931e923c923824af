"""Decontamination: excludes training problems that equal or largely overlap a problem of the evaluation sets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from or1_megatron.data.pipeline.normalise import published_rows, source_digest
from or1_megatron.data.pipeline.recipe import DecontaminationConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.steps import PipelineStep
from or1_megatron.data.pipeline.text import comparable, text_key, words
from or1_verify.problems.rows import RowError
from or1_verify.problems.unusable import UnusableRows


@dataclass(frozen=True)
class _Evaluated:
    """A problem of an evaluation set, and the n-grams of its statement."""

    origin: str
    statement: str
    grams: frozenset[str]


class Decontamination(PipelineStep[DecontaminationConfig]):
    """Excludes a problem whose normalised text equals an evaluation problem's text or shares enough n-grams with it.

    The overlap is a share of the shorter text's n-grams, so a problem inside a longer statement is found, too.
    """

    name = "decontaminate"

    def __init__(self, config: DecontaminationConfig, unusable: Path) -> None:
        """``unusable``: file to which the unusable rows of the evaluation sets are written if there are many."""
        super().__init__(config)
        self._unusable = unusable
        self._evaluated: list[_Evaluated] = []
        self._by_text: dict[int, _Evaluated] = {}
        self._by_gram: dict[str, list[int]] = defaultdict(list)

    def settings(self) -> Mapping[str, Any]:
        return {**super().settings(), "digests": [source_digest(source) for source in self._config.against]}

    def prepare(self, shards: Sequence[Path]) -> None:
        faults = UnusableRows()
        for source in self._config.against:
            for origin, row in published_rows(source):
                if isinstance(row, RowError):
                    faults.add(row)
                    continue
                text = comparable(row.statement)
                evaluated = _Evaluated(origin, row.statement, self._grams(text))
                self._by_text.setdefault(text_key(text), evaluated)
                for gram in evaluated.grams:
                    self._by_gram[gram].append(len(self._evaluated))
                self._evaluated.append(evaluated)
        faults.refuse(self._unusable)  # an evaluation problem left out here would not be found in the training set

    def decide(self, row: Candidate, number: int) -> Outcome:
        evidence = self._evidence(comparable(row.statement))
        return row if evidence is None else Exclusion(row, "contaminated", evidence)

    def _grams(self, text: str) -> frozenset[str]:
        size, parts = self._config.ngram_words, words(text)
        return frozenset(" ".join(parts[start : start + size]) for start in range(len(parts) - size + 1))

    def _evidence(self, text: str) -> dict[str, Any] | None:
        """Return evidence about the evaluation problem that the text equals or overlaps most; None if there is none."""
        if (equal := self._by_text.get(text_key(text))) is not None:
            return {"match": "normalised text", **_named(equal)}
        grams = self._grams(text)
        shared = Counter(index for gram in grams for index in self._by_gram.get(gram, ()))
        parts = {index: count / min(len(grams), len(self._evaluated[index].grams)) for index, count in shared.items()}
        best = max(parts, key=lambda index: (parts[index], -index), default=-1)
        if best < 0 or parts[best] < self._config.overlap:
            return None
        return {
            "match": f"{self._config.ngram_words}-grams",
            "overlap": round(parts[best], 4),
            "shared_ngrams": shared[best],
            **_named(self._evaluated[best]),
        }


def _named(evaluated: _Evaluated) -> dict[str, Any]:
    return {"of_origin": evaluated.origin, "of_statement": evaluated.statement[:200]}
