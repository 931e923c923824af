"""Sample, judge and keep: k responses to every problem, each judged while others decode."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from or1_megatron.evaluate.responses import EvaluationError, Response, ResponseStore
from or1_megatron.interfaces import Sampler
from or1_megatron.types import Answer, Ask, Problem, Unanswered, Verdict

Judge = Callable[[Problem, str, bool], Future[Verdict]]
"""(problem, response, truncated) to a verdict to come."""

Progress = Callable[[int, int], None]
"""(judged, asked for in all); called as responses are kept."""

_LINE_UP = 512
"""Verdicts that may be waited for at once: bounds the responses held in memory."""


def ask_seed(seed: int, problem_id: str, sample: int) -> int:
    """In [0, 2**31), as every endpoint takes it: of its problem and sample alone, so that k may grow later."""
    text = f"{seed},{problem_id},{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def evaluate(
    problems: Sequence[Problem],
    samples: int,
    sampler: Sampler | None,
    judge: Judge,
    store: ResponseStore,
    seed: int,
    progress: Progress = lambda judged, wanted: None,
) -> list[list[Response]]:
    """[P][samples] responses, those that the store has already taken from it.

    Samples are asked for round by round, so that the samples of one problem are spread over engines and time.
    ``sampler`` may be None when nothing is missing.

    Raises:
        EvaluationError: the model did not answer everything; what it did answer is kept.
    """
    by_id = {problem.id: problem for problem in problems}
    wanted = len(problems) * samples
    judged = sum(store.has(problem.id, sample) for problem in problems for sample in range(samples))
    progress(judged, wanted)
    missing = [
        Ask(problem.id, sample, problem.messages, ask_seed(seed, problem.id, sample))
        for sample in range(samples)
        for problem in problems
        if not store.has(problem.id, sample)
    ]
    failures: list[str] = []
    if missing:
        assert sampler is not None, "responses are missing, but there is no sampler"
        for response in _judged(sampler.sample(missing), by_id, judge, failures):
            store.add(response)
            judged += 1
            progress(judged, wanted)
    rows = [[store.get(problem.id, sample) for sample in range(samples)] for problem in problems]
    complete = [[response for response in row if response is not None] for row in rows]
    if any(len(row) < samples for row in complete):
        reason = f" (first: {failures[0]})" if failures else ""
        raise EvaluationError(
            f"{wanted - judged} of {wanted} responses did not come{reason}; those that did are kept: run the same "
            "command again to ask for the rest"
        )
    return complete


def missing_count(problems: Sequence[Problem], samples: int, store: ResponseStore) -> int:
    return sum(not store.has(problem.id, sample) for problem in problems for sample in range(samples))


def _judged(
    replies: Iterator[Answer | Unanswered], problems: dict[str, Problem], judge: Judge, failures: list[str]
) -> Iterator[Response]:
    """Responses with their verdicts, in the order in which they came."""
    line: deque[tuple[Answer, Future[Verdict]]] = deque()
    for reply in replies:
        problem = problems[reply.ask.key]
        if isinstance(reply, Unanswered):
            if reply.for_good:
                yield _unasked(problem, reply)
            else:
                failures.append(reply.reason)
            continue
        line.append((reply, judge(problem, reply.text, reply.truncated)))
        while line and (line[0][1].done() or len(line) > _LINE_UP):
            yield _response(problems, *line.popleft())
    while line:
        yield _response(problems, *line.popleft())


def _response(problems: dict[str, Problem], answer: Answer, verdict: Future[Verdict]) -> Response:
    problem, said = problems[answer.ask.key], verdict.result()
    return Response(
        problem_id=problem.id,
        sample=answer.ask.sample,
        source=problem.source,
        ability=problem.ability,
        ground_truth=problem.ground_truth,
        prompt=problem.messages[-1].content,
        response=answer.text,
        tokens=answer.tokens,
        truncated=answer.truncated,
        reward=said.reward,
        status=said.status,
        answer=said.answer,
        detail=said.detail,
        seed=answer.ask.seed,
    )


def _unasked(problem: Problem, reply: Unanswered) -> Response:
    return Response(
        problem_id=problem.id,
        sample=reply.ask.sample,
        source=problem.source,
        ability=problem.ability,
        ground_truth=problem.ground_truth,
        prompt=problem.messages[-1].content,
        response="",
        tokens=None,
        truncated=False,
        reward=0.0,
        status="unasked",
        answer="",
        detail=reply.reason,
        seed=reply.ask.seed,
    )
