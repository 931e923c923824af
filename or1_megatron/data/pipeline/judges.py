"""Quality judges of the data build: several models vote, several times each, on how a math problem is stated."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from or1_megatron.data.pipeline.recipe import JudgesConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.sampling import REFUSED, Answers, ModelStep, ResultStore
from or1_megatron.types import ChatRequest
from or1_verify.problems.rows import DataError
from or1_verify.types import Message

CRITERIA = (
    ("clear", "the wording is clear: it can be read in one way only"),
    ("complete", "the information is complete: nothing that the answer depends on is missing"),
    ("formatted", "the formatting is good: formulas, symbols and text are readable and nothing is garbled"),
    ("focused", "there are no distractions: no hints, solutions, advertising, translation notes or unrelated text"),
)
"""The paper's four criteria, in our words."""

NO_VOTE = "no_vote"
"""Result of an answer without a readable vote."""

_QUESTION = """You are asked whether a math problem is fit for an exam. Do not solve it. Judge only how it is put:

{criteria}

The problem stands between the two lines of equals signs.

==========
{statement}
==========

Think it over, then end your answer with exactly four lines, one for each point, each with yes or no:

{lines}"""
_LINE = re.compile(rf"^[\s*\-#>]*({'|'.join(name for name, _ in CRITERIA)})[\s*]*[:=][\s*]*(yes|no)\b", re.I | re.M)
_MOST_WITHOUT_VOTE = 0.5  # share of a judge's answers


def read_vote(answer: str) -> str:
    """Return a judge's four answers as y and n, such as "yyny"; NO_VOTE if an answer is missing.

    Only text after the reasoning is read. If a criterion is answered more than once, the last answer counts.
    """
    said = answer.rpartition("</think>")[2]
    words = {name.lower(): word[0].lower() for name, word in _LINE.findall(said)}
    return "".join(words[name] for name, _ in CRITERIA) if len(words) == len(CRITERIA) else NO_VOTE


class Judges(ModelStep[JudgesConfig]):
    """Asks models for votes on math problems, and excludes problems with too few good votes. Its results are votes."""

    name = "judges"
    only_counts = frozenset({"votes", "keep_at_least"})

    def _samples(self, row: Candidate) -> int:
        return self._config.votes if row.ability == "math" else 0

    def _messages(self, row: Candidate) -> tuple[Message, ...]:
        criteria = "\n".join(f"- {name}: {meaning}." for name, meaning in CRITERIA)
        lines = "\n".join(f"{name}: yes or no" for name, _ in CRITERIA)
        return (Message("user", _QUESTION.format(criteria=criteria, statement=row.statement, lines=lines)),)

    def _judged(self, answers: Answers) -> Iterator[tuple[ChatRequest, str]]:
        for _, answer in answers:
            yield answer.request, read_vote(answer.text)

    def _check(self, model: str, rows: Iterator[Candidate], store: ResultStore) -> None:
        votes = Counter(vote for row in rows for vote in self._given(row, store))
        if votes[NO_VOTE] > _MOST_WITHOUT_VOTE * votes.total():
            raise DataError(
                f"step 'judges': {votes[NO_VOTE]} of {votes.total()} answers of '{model}' hold no vote (expected four "
                "lines such as 'clear: yes'): is it the right model, with its chat template, and max_response_tokens = "
                f"{self._config.max_response_tokens} enough? Without {store.path} the model is asked again"
            )

    def _decided(self, row: Candidate, given: Mapping[str, Sequence[str]]) -> Outcome:
        config = self._config
        every = [vote for votes in given.values() for vote in votes]
        readable = [vote for vote in every if vote not in (NO_VOTE, REFUSED)]
        favourable = sum("n" not in vote for vote in readable)
        counted = {"for": favourable, "readable": len(readable), "of": config.votes * len(config.models)}
        if favourable >= config.keep_at_least:
            return replace(row, notes={**row.notes, "votes": counted})
        against = {name: sum(vote[index] == "n" for vote in readable) for index, (name, _) in enumerate(CRITERIA)}
        by_model = {name: sum(set(vote) == {"y"} for vote in votes) for name, votes in given.items()}
        evidence = {**counted, "needed": config.keep_at_least, "for_by_model": by_model, "against": against}
        if REFUSED in every and not readable:
            return Exclusion(row, "prompt_too_long", evidence)
        enough = len(readable) >= config.keep_at_least
        return Exclusion(row, "voted_out" if enough else "too_few_votes", evidence)

    def _request_settings(self) -> dict[str, Any]:
        asked = hashlib.sha256((_QUESTION + str(CRITERIA)).encode()).hexdigest()[:12]
        return {**super()._request_settings(), "question": asked}
