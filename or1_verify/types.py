"""The verifiers' records (problem, message, verdict) and the protocol ``Verifier`` that every verifier has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

VerdictStatus = Literal["right", "wrong", "truncated", "no_answer", "unreadable", "timeout", "error"]
"""Outcome of a verdict; pass rates count ``right``. ``unreadable``: no gold answer can be parsed, and none has the
same text as the answer. ``timeout``, ``error``: the verifier failed, so the response does not count as wrong."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a problem set, with the fields of Skywork-OR1-RL-Data (docs/schemas.md).

    ``id`` is stable across files and runs (a hash of source and prompt); ``ground_truth`` is the unparsed string of the
    data row's ``reward_model``; ``origin`` is ``file:line``, for error messages.
    """

    id: str
    source: str
    ability: str
    messages: tuple[Message, ...]
    ground_truth: str
    difficulty: Mapping[str, int]
    origin: str


def problem_of(fields: Mapping[str, Any]) -> Problem:
    """Return the problem whose ``asdict`` is ``fields``."""
    return Problem(**{**fields, "messages": tuple(Message(**message) for message in fields["messages"])})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement of one response: reward, status, extracted answer, explanation, and time taken.

    Our verifiers give reward 1 for ``right``, else 0; a user's verifier may give any number (``verify.right_reward``).
    """

    reward: float
    status: VerdictStatus
    answer: str
    """The final answer extracted from the response; empty if there is none."""
    detail: str
    wall_s: float


Attempt = tuple[Problem, str, bool]
"""(problem, response text, whether the response was truncated): all that a verifier needs to judge."""


@runtime_checkable
class Verifier(Protocol):
    """Judges responses to problems of one ability ("math", "code")."""

    def start(self) -> None:
        """Begin to start the processes that verdicts need. Without this call the first verdict starts them."""
        return

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError, with what was expected, if the problem's ground truth cannot be used."""

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Return the verdict on a response. No response, however odd, makes this method raise."""

    def close(self) -> None:
        """Stop the processes that the verifier has started."""
