"""Judges: several models vote, several times each, on how a problem is stated; with too few votes for it, it goes."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from or1_megatron.data.chat import chat_seed
from or1_megatron.data.pipeline.recipe import JudgesConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, Outcome
from or1_megatron.data.pipeline.results import ResultStore
from or1_megatron.data.pipeline.sampling import REFUSED, ModelRun, ModelStep, result_key, statuses
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
"""A result: an answer that holds no vote."""

_QUESTION = """You are asked whether a {kind} problem is fit for an exam. Do not solve it. Judge only how it is put:

{criteria}

The problem stands between the two lines of equals signs.

==========
{statement}
==========

Think it over, then end your answer with exactly four lines, one for each point, each with yes or no:

{lines}"""
_LINE = re.compile(rf"^[\s*\-#>]*({'|'.join(name for name, _ in CRITERIA)})[\s*]*[:=][\s*]*(yes|no)\b", re.I | re.M)
_GARBAGE_SHOWN = 3


def question(row: Candidate) -> tuple[Message, ...]:
    """Return the messages that ask a judge about a problem."""
    criteria = "\n".join(f"- {name}: {meaning}." for name, meaning in CRITERIA)
    lines = "\n".join(f"{name}: yes or no" for name, _ in CRITERIA)
    kind = "programming" if row.ability == "code" else "mathematics"
    text = _QUESTION.format(kind=kind, criteria=criteria, statement=row.statement, lines=lines)
    return (Message("user", text),)


def read_vote(answer: str) -> str:
    """Return the four criteria as y and n, such as "yyny"; NO_VOTE unless each is answered after the reasoning.

    The last answer to a criterion counts.
    """
    said = answer.rpartition("</think>")[2]
    found = {name.lower(): word[0].lower() for name, word in _LINE.findall(said)}
    return "".join(found[name] for name, _ in CRITERIA) if len(found) == len(CRITERIA) else NO_VOTE


class Judges(ModelStep[JudgesConfig]):
    """Stores each vote, with the attempt at which it was given, as the result."""

    name = "judges"
    code = ("data/pipeline/judges.py", "data/pipeline/sampling.py", "data/chat.py")

    def settings(self) -> Mapping[str, Any]:
        ours = self._config.model_dump(mode="json", include={"abilities", "votes", "keep_at_least", "retries"})
        return {**super().settings(), **ours}

    def apply(self, rows: Sequence[Candidate], first: int) -> list[Outcome]:
        return [self._judged(row) if row.ability in self._config.abilities else row for row in rows]

    def _sample_missing(self, model: ModelRun) -> None:
        """Sample a vote that cannot be read again, with another seed, up to ``retries`` times."""
        garbage: list[str] = []
        for attempt in range(self._config.retries + 1):
            refused = {"vote": REFUSED, "attempt": attempt}
            for _, completion in model.completions(partial(self._requests, model.store, attempt), refused):
                vote = read_vote(completion.text)
                if vote == NO_VOTE and len(garbage) < _GARBAGE_SHOWN:
                    garbage.append(completion.text[-80:])
                request = completion.request
                model.store.add(request.key, request.sample_index, {"vote": vote, "attempt": attempt})
        votes = Counter(result["vote"] for row in model.rows() for result in self._given(row, model.store))
        if votes[NO_VOTE] > self._config.max_without_vote * votes.total():
            ends = f"; some end in {garbage}" if garbage else ""
            raise DataError(
                f"step 'judges': {votes[NO_VOTE]} of {votes.total()} answers of '{model.name}' hold no vote, each "
                f"after {self._config.retries} retries (expected four lines such as 'clear: yes'{ends}); that is more "
                f"than judges.max_without_vote = {self._config.max_without_vote:g}: is it the right model, with its "
                f"chat template, and max_response_tokens = {self._config.max_response_tokens} enough? The votes are "
                f"kept in {model.store.path}"
            )

    def _given(self, row: Candidate, store: ResultStore) -> list[Any]:
        return statuses(store.of(result_key(row)), self._config.votes)

    def _requests(self, store: ResultStore, attempt: int, row: Candidate) -> list[ChatRequest]:
        if row.ability not in self._config.abilities:
            return []
        key = result_key(row)
        known = store.of(key)
        missing = []
        for sample in range(self._config.votes):
            result = known.get(sample)
            if result is None or (result["vote"] == NO_VOTE and result["attempt"] < attempt):
                missing.append(sample)
        if not missing or any(result["vote"] == REFUSED for result in known.values()):
            return []
        asked = question(row)
        return [ChatRequest(key, n, asked, chat_seed(self._config.seed, key, n, attempt)) for n in missing]

    def _judged(self, row: Candidate) -> Outcome:
        config = self._config
        given = {name: [result["vote"] for result in self._given(row, store)] for name, store in self._stores.items()}
        every = [vote for votes in given.values() for vote in votes]
        readable = [vote for vote in every if vote not in (NO_VOTE, REFUSED)]
        favourable = sum("n" not in vote for vote in readable)
        counted = {"for": favourable, "readable": len(readable), "of": config.votes * len(config.models)}
        if favourable >= config.keep_at_least:
            return replace(row, notes={**row.notes, "votes": counted})
        against = {name: sum(vote[place] == "n" for vote in readable) for place, (name, _) in enumerate(CRITERIA)}
        by_model = {name: sum(set(vote) == {"y"} for vote in votes) for name, votes in given.items()}
        evidence = {**counted, "needed": config.keep_at_least, "for_by_model": by_model, "against": against}
        if REFUSED in every and not readable:
            return Exclusion(row, "prompt_too_long", evidence)
        enough = len(readable) >= config.keep_at_least
        return Exclusion(row, "voted_out" if enough else "too_few_votes", evidence)

    def _request_settings(self) -> dict[str, Any]:
        asked = hashlib.sha256((_QUESTION + str(CRITERIA)).encode()).hexdigest()[:12]
        names = {"temperature", "top_p", "max_response_tokens", "max_prompt_tokens", "seed"}
        return {**self._config.model_dump(mode="json", include=names), "question": asked}
