"""Verifiers at work on several threads, each with its own: a verifier does one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from or1_megatron.interfaces import Verifier
from or1_megatron.types import Problem, Verdict

MakeVerifiers = Callable[[float, frozenset[str]], Mapping[str, Verifier]]
"""(limit of one verdict in seconds, abilities) to a verifier for each; raises where one cannot be had."""


class VerifierThreads:
    """``workers`` threads that judge. Verifiers are made when first needed, and closed at the end."""

    def __init__(self, make: MakeVerifiers, timeout_s: float, abilities: frozenset[str], workers: int) -> None:
        self._make, self._timeout_s, self._abilities = make, timeout_s, abilities
        self._own = threading.local()
        self._all: list[Verifier] = []
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")

    def check(self, problem: Problem) -> str:
        """Why the ground truth cannot be used; "" when it can. On the calling thread."""
        try:
            self._verifier(problem.ability).check_ground_truth(problem)
        except ValueError as error:
            return str(error)
        return ""

    def verdicts(self, claims: Iterable[tuple[Problem, str]]) -> Iterator[Verdict]:
        """Of (problem, response) pairs, in their order."""
        return self._threads.map(lambda claim: self._verify(*claim), claims)

    def verdict(self, problem: Problem, response: str, truncated: bool) -> Future[Verdict]:
        return self._threads.submit(self._verify, problem, response, truncated)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for verifier in self._all:
            close = getattr(verifier, "close", None)
            if close is not None:
                close()

    def _verify(self, problem: Problem, response: str, truncated: bool = False) -> Verdict:
        return self._verifier(problem.ability).verify(problem, response, truncated)

    def _verifier(self, ability: str) -> Verifier:
        mine: Mapping[str, Verifier] | None = getattr(self._own, "verifiers", None)
        if mine is None:
            mine = self._own.verifiers = self._make(self._timeout_s, self._abilities)
            self._all.extend(mine.values())
        return mine[ability]
