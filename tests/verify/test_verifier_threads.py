"""Verdicts on threads: their order, what a failure leaves, and that processes start before they are needed.

Not shown: how fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from or1_verify.math.verifier import MathVerifier
from or1_verify.types import Message, Problem, Verdict
from or1_verify.verifier_threads import VerifierThreads, judged

PROBLEM = Problem("p", "s", "math", (Message("user", "?"),), '["x^2 + 2x"]', {}, "file:1")


def numbers(count: int) -> Iterator[int]:
    yield from range(count)
    raise ConnectionError("the engine died")


def test_what_came_before_a_failure_is_judged_and_in_order() -> None:
    """No verdict is made before the last answer has come; then all are, the first one last."""
    waiting: list[Future[Verdict]] = []

    def judge(number: int) -> Future[Verdict]:
        waiting.append(Future())
        if len(waiting) == 4:
            for place, future in reversed(list(enumerate(waiting))):
                future.set_result(Verdict(1.0, "right", str(place), "", 0.0))
        return waiting[-1]

    results = []
    with pytest.raises(ConnectionError, match="the engine died"):
        for number, verdict in judged(numbers(4), judge):
            results.append((number, verdict.answer))
    assert results == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]


def test_processes_start_before_the_first_verdict_and_one_serves_check_and_verdicts() -> None:
    made: list[MathVerifier] = []

    def make() -> dict[str, MathVerifier]:
        made.append(MathVerifier(20.0))
        return {"math": made[-1]}

    threads = VerifierThreads(make, 1)
    assert not made
    threads.start()
    pids = [verifier.worker_pid for verifier in made]
    assert len(pids) == 1 and pids[0] is not None
    with threads.borrowed() as verifiers:
        verifiers["math"].check_ground_truth(PROBLEM)
    assert threads.verdict(PROBLEM, "</think>\\boxed{x(x + 2)}", False).result().status == "right"
    assert [verifier.worker_pid for verifier in made] == pids
    threads.close()
    assert made[0].worker_pid is None
