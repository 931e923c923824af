"""The records of verifying: a problem, the verdict on a response to it, and the protocol of what judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

VerdictStatus = Literal["right", "wrong", "truncated", "no_answer", "unreadable", "timeout", "error"]
"""How a verdict came about: pass rates count ``right``. ``unreadable``: no gold can be read, and the answer is another
text. ``timeout`` and ``error``: the verifier itself failed on the sample, which does not count as a wrong answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a problem set, with the fields of Skywork-OR1-RL-Data (docs/schemas.md).

    ``id`` is stable across files and runs (a hash of source and prompt); ``ground_truth`` is the raw string of the
    row's ``reward_model``; ``origin`` is ``file:line``, for error messages.
    """

    id: str
    source: str
    ability: str
    messages: tuple[Message, ...]
    ground_truth: str
    difficulty: Mapping[str, int]
    origin: str


def problem_of(fields: Mapping[str, Any]) -> Problem:
    """Return the problem whose fields ``dataclasses.asdict`` gave."""
    return Problem(**{**fields, "messages": tuple(Message(**message) for message in fields["messages"])})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's judgement of one response: its reward, why, and how long it took.

    Our verifiers give 1 for ``right`` and else 0; one of a user's own gives any number (``verify.right_reward``)."""

    reward: float
    status: VerdictStatus
    answer: str
    """The final answer as extracted from the response; empty when there is none."""
    detail: str
    wall_s: float


Attempt = tuple[Problem, str, bool]
"""(problem, response text, truncated): all that a verifier needs of a response."""


@runtime_checkable
class Verifier(Protocol):
    """Judges responses to problems of one ability ("math", "code")."""

    def start(self) -> None:
        """Start what verdicts need, in the background. Without this call the first verdicts start it."""
        return

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError, with what was expected, when the problem's ground truth cannot be used."""

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Return the verdict. Nothing in the response makes it raise."""

    def close(self) -> None:
        """Stop the processes that the verifier has started."""
