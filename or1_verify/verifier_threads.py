"""Threads that judge several responses at once in this process, each with verifiers of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import LifoQueue
from typing import Final

from or1_verify.config import VerifyConfig
from or1_verify.types import Problem, Verdict, Verifier
from or1_verify.verifiers import build_verifiers

_MOST_WAITING: Final = 512
"""Largest number of responses that ``judged`` holds at once, judged or not, which bounds the memory."""


class VerifierThreads:
    """Judges responses on ``workers`` threads. Each uses a set of verifiers; ``make`` makes a set when none is free."""

    def __init__(self, make: Callable[[], Mapping[str, Verifier]], workers: int) -> None:
        self._make = make
        # The set that was used last is taken first, so that no more sets are made than are in use at once.
        self._idle: LifoQueue[Mapping[str, Verifier] | None] = LifoQueue()
        self._all: list[Verifier] = []
        for _ in range(workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verifier")

    def start(self) -> None:
        """Make all verifiers now and begin to start their processes, without waiting for them.

        Raises what ``make`` raises.
        """
        with ExitStack() as borrowed:
            for _ in range(self._idle.qsize()):
                for verifier in borrowed.enter_context(self.borrowed()).values():
                    verifier.start()

    def verdict(self, problem: Problem, response: str, truncated: bool = False) -> Future[Verdict]:
        """Start to judge a response on one of the threads. Return a future of the verdict."""
        return self._threads.submit(self.verify, problem, response, truncated)

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Judge a response on the calling thread."""
        with self.borrowed() as verifiers:
            return verifiers[problem.ability].verify(problem, response, truncated)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for verifier in self._all:
            verifier.close()

    @contextmanager
    def borrowed(self) -> Iterator[Mapping[str, Verifier]]:
        """Give the caller a set of verifiers, by ability, that no other thread uses within the ``with`` block."""
        verifiers = self._idle.get()
        try:
            if verifiers is None:
                verifiers = self._make()
                self._all.extend(verifiers.values())
            yield verifiers
        finally:
            self._idle.put(verifiers)


def one_by_one(config: VerifyConfig, abilities: Iterable[str]) -> VerifierThreads:
    """Return a single verifier thread, and begin to start its processes. Raises what ``build_verifiers`` raises."""
    verifiers = VerifierThreads(partial(build_verifiers, config, abilities), 1)
    verifiers.start()
    return verifiers


def judged[T](items: Iterable[T], judge: Callable[[T], Future[Verdict]]) -> Iterator[tuple[T, Verdict]]:
    """Yield (item, its verdict) in the order of ``items``, while later items are judged. ``judge`` starts a verdict.

    If ``items`` raises, the verdicts on all earlier items are yielded before the exception.
    """
    waiting: deque[tuple[T, Future[Verdict]]] = deque()
    failure: Exception | None = None
    try:
        for item in items:
            waiting.append((item, judge(item)))
            while waiting and (waiting[0][1].done() or len(waiting) > _MOST_WAITING):
                first, verdict = waiting.popleft()
                yield first, verdict.result()
    except Exception as error:
        failure = error
    for first, verdict in waiting:
        yield first, verdict.result()
    if failure is not None:
        raise failure
