"""Sample, judge and keep: k responses to every problem, each judged while others decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from or1_megatron.data.pipeline.sampling import chat_seed
from or1_megatron.data.pipeline.verdicts import Judge, judged
from or1_megatron.evaluate.responses import EvaluationError, Response, ResponseStore
from or1_megatron.interfaces import Sampler
from or1_megatron.types import ChatCompletion, ChatRequest, FailedRequest, Problem, Verdict

Progress = Callable[[int, int], None]
"""(judged, asked for in all); called as responses are kept."""


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
    missing = [
        ChatRequest(problem.id, sample, problem.messages, chat_seed(seed, problem.id, sample))
        for sample in range(samples)
        for problem in problems
        if not store.has(problem.id, sample)
    ]
    kept = wanted - len(missing)
    progress(kept, wanted)

    def keep(response: Response) -> None:
        nonlocal kept
        store.add(response)
        kept += 1
        progress(kept, wanted)

    failures: list[str] = []
    refused: list[FailedRequest] = []
    if missing:
        assert sampler is not None, "responses are missing, but there is no sampler"
        completions = _completions(sampler.sample(missing), by_id, refused, failures)
        for problem, completion, verdict in judged(completions, judge):
            keep(_response(problem, completion, verdict))
    if refused and not kept:  # says something of the request, not of the problems
        raise EvaluationError(
            f"every request was refused, {len(refused)} so far (first: {refused[0].reason}); expected that only "
            "prompts which are too long are: is max_response_tokens too much for the model, or max_prompt_tokens too "
            "little for the problems?"
        )
    for reply in refused:
        keep(_unasked(by_id[reply.request.key], reply))
    rows = [[store.get(problem.id, sample) for sample in range(samples)] for problem in problems]
    complete = [[response for response in row if response is not None] for row in rows]
    if any(len(row) < samples for row in complete):
        reason = f" (first: {failures[0]})" if failures else ""
        raise EvaluationError(
            f"{wanted - kept} of {wanted} responses did not come{reason}; those that did are kept: run the same "
            "command again to ask for the rest"
        )
    return complete


def missing_count(problems: Sequence[Problem], samples: int, store: ResponseStore) -> int:
    return sum(not store.has(problem.id, sample) for problem in problems for sample in range(samples))


def _completions(
    replies: Iterator[ChatCompletion | FailedRequest],
    problems: Mapping[str, Problem],
    refused: list[FailedRequest],
    failures: list[str],
) -> Iterator[tuple[Problem, ChatCompletion]]:
    """Yield the completions; append what failed to ``refused`` or ``failures``."""
    for reply in replies:
        if isinstance(reply, ChatCompletion):
            yield problems[reply.request.key], reply
        elif reply.permanent:
            refused.append(reply)
        else:
            failures.append(reply.reason)


def _response(problem: Problem, completion: ChatCompletion, verdict: Verdict) -> Response:
    return Response(
        problem_id=problem.id,
        sample=completion.request.sample_index,
        source=problem.source,
        ability=problem.ability,
        ground_truth=problem.ground_truth,
        prompt=problem.messages[-1].content,
        response=completion.text,
        tokens=completion.tokens,
        truncated=completion.truncated,
        reward=verdict.reward,
        status=verdict.status,
        answer=verdict.answer,
        detail=verdict.detail,
        seed=completion.request.seed,
    )


def _unasked(problem: Problem, reply: FailedRequest) -> Response:
    return Response(
        problem_id=problem.id,
        sample=reply.request.sample_index,
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
        seed=reply.request.seed,
    )
