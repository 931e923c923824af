"""Samples k responses to every problem for ``or1 eval``, judges them while others are sampled, and stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace

from or1_megatron.evaluate.response_store import EvaluationError, Response, ResponseStore
from or1_megatron.interfaces import Sampler
from or1_megatron.runtime.seeds import derive_seed
from or1_megatron.types import ChatCompletion, ChatRequest, FailedRequest, Replies
from or1_verify.types import Problem, Verdict
from or1_verify.verifier_threads import judged

Judge = Callable[[Problem, str, bool], Future[Verdict]]
"""(problem, response, whether it was truncated) -> future of the verdict."""

Progress = Callable[[int, int], None]
"""Called after each stored response, with (number of responses stored, number wanted)."""


def evaluate(
    problems: Sequence[Problem],
    samples: int,
    open_sampler: Callable[[int], AbstractContextManager[Sampler]],
    judge: Judge,
    store: ResponseStore,
    seed: int,
    progress: Progress = lambda stored, wanted: None,
) -> list[list[Response]]:
    """Sample and judge the responses that the store lacks, and return all responses, [P][samples].

    Requests are sent round by round, so that the samples of one problem are spread over engines and time.
    ``open_sampler`` gets the number of missing responses, and is not called if none is missing.

    Raises:
        EvaluationError: requests failed (the other responses are stored), or all were refused.
    """
    by_id = {problem.id: problem for problem in problems}
    wanted = len(problems) * samples
    missing = [
        ChatRequest(problem.id, sample, problem.messages, derive_seed(seed, problem.id, sample))
        for sample in range(samples)
        for problem in problems
        if store.get(problem.id, sample) is None
    ]
    stored = wanted - len(missing)
    progress(stored, wanted)

    def keep(response: Response) -> None:
        nonlocal stored
        store.add(response)
        stored += 1
        progress(stored, wanted)

    replies = Replies(())
    if missing:
        with open_sampler(len(missing)) as sampler:
            replies = Replies(sampler.sample(missing))
            for completion, verdict in judged(replies, lambda it: judge(by_id[it.request.key], it.text, it.truncated)):
                keep(_response(by_id[completion.request.key], completion, verdict))
    if replies.refused and not stored:  # the requests are wrong, not the problems
        raise EvaluationError(
            f"every request was refused, {len(replies.refused)} so far (first: {replies.refused[0].reason}); expected "
            "that only prompts which are too long are: is max_response_tokens too much for the model, or "
            "max_prompt_tokens too little for the problems?"
        )
    for refused in replies.refused:
        keep(_unasked(by_id[refused.request.key], refused))
    rows = [[store.get(problem.id, sample) for sample in range(samples)] for problem in problems]
    complete = [[response for response in row if response is not None] for row in rows]
    if any(len(row) < samples for row in complete):
        reason = f" (first: {replies.failures[0]})" if replies.failures else ""
        raise EvaluationError(
            f"{wanted - stored} of {wanted} responses did not come{reason}; those that did are kept: run the same "
            "command again to ask for the rest"
        )
    return complete


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


def _unasked(problem: Problem, refused: FailedRequest) -> Response:
    completion = ChatCompletion(refused.request, "", truncated=False)
    verdict = Verdict(0.0, "error", "", refused.reason, 0.0)
    return replace(_response(problem, completion, verdict), status="unasked")
