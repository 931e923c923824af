"""Verifiers at work on several threads; each does one thing at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import LifoQueue
from typing import Final

from or1_megatron.interfaces import Verifier
from or1_megatron.types import ChatCompletion, Problem, Verdict

MakeVerifiers = Callable[[float, frozenset[str]], Mapping[str, Verifier]]
"""(limit of one verdict in seconds, abilities) to a verifier for each; raises where one cannot be had."""

Judge = Callable[[Problem, str, bool], Future[Verdict]]
"""(problem, response, truncated) to a verdict to come."""

_LINE_UP: Final = 512
"""Verdicts that may be waited for at once: bounds the responses held in memory."""


class VerifierThreads:
    """``workers`` threads that judge, with as many sets of verifiers, each made when it is first needed."""

    def __init__(self, make: MakeVerifiers, timeout_s: float, abilities: frozenset[str], workers: int) -> None:
        self._make, self._timeout_s, self._abilities = make, timeout_s, abilities
        # The last one used is the next one taken: what has not been made is made last.
        self._idle: LifoQueue[Mapping[str, Verifier] | None] = LifoQueue()
        self._all: list[Verifier] = []
        for _ in range(workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")

    def start(self) -> None:
        """Make all verifiers and begin to start their processes, instead of at the first verdicts; does not wait.

        Raises what ``make`` raises.
        """
        with ExitStack() as borrowed:
            for _ in range(self._idle.qsize()):
                for verifier in borrowed.enter_context(self.borrowed()).values():
                    verifier.start()

    def check(self, problem: Problem) -> str:
        """Why the ground truth cannot be used; "" when it can. On the calling thread."""
        with self.borrowed() as verifiers:
            try:
                verifiers[problem.ability].check_ground_truth(problem)
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
            verifier.close()

    def _verify(self, problem: Problem, response: str, truncated: bool = False) -> Verdict:
        with self.borrowed() as verifiers:
            return verifiers[problem.ability].verify(problem, response, truncated)

    @contextmanager
    def borrowed(self) -> Iterator[Mapping[str, Verifier]]:
        """A set of verifiers by ability, which does nothing else meanwhile."""
        verifiers = self._idle.get()
        try:
            if verifiers is None:
                verifiers = self._make(self._timeout_s, self._abilities)
                self._all.extend(verifiers.values())
            yield verifiers
        finally:
            self._idle.put(verifiers)


def judged(
    completions: Iterable[tuple[Problem, ChatCompletion]], judge: Judge
) -> Iterator[tuple[Problem, ChatCompletion, Verdict]]:
    """Yield completions with their verdicts, in the order in which they came; more are read while verdicts are made.

    When ``completions`` raises, those that came before are judged first.
    """
    line: deque[tuple[Problem, ChatCompletion, Future[Verdict]]] = deque()
    failure: Exception | None = None
    try:
        for problem, completion in completions:
            line.append((problem, completion, judge(problem, completion.text, completion.truncated)))
            while line and (line[0][2].done() or len(line) > _LINE_UP):
                problem, completion, verdict = line.popleft()
                yield problem, completion, verdict.result()
    except Exception as error:
        failure = error
    for problem, completion, verdict in line:
        yield problem, completion, verdict.result()
    if failure is not None:
        raise failure
