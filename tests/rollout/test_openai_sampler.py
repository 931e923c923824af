"""Asking an endpoint over real HTTP: what is sent, what is retried and how often, what is given up. TLS and real
servers' own habits are not tried."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from openai_server import Reply, completion, serving
from waiting import PATIENCE_S, wait_until

from or1_megatron.rollout.openai_sampler import Endpoint, OpenAISampler
from or1_megatron.types import ChatCompletion, ChatRequest, FailedRequest, Sampling
from or1_verify.types import Message

SAMPLING = Sampling(0.7, 0.9, 55)


def requests(count: int) -> list[ChatRequest]:
    return [ChatRequest(f"p{n}", n, (Message("user", f"question {n}"),), 100 + n) for n in range(count)]


def sampled(url: str, count: int, **more: Any) -> list[ChatCompletion | FailedRequest]:
    endpoint = Endpoint(url, "judge", **{"tries": 3, "backoff_s": 0.01, "concurrent": 4, **more})
    return list(OpenAISampler(endpoint, SAMPLING).sample(iter(requests(count))))


def test_requests_say_what_is_wanted_and_replies_come_back_with_their_requests() -> None:
    seen: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> Reply:
        seen.append(body)
        number = body["messages"][0]["content"].split()[1]
        if number == "3":
            return completion("4", reasoning_content="two and two")
        text: Any = f"to {number}"
        if number == "6":  # as parts, one of which is no text of the answer
            text = [{"type": "text", "text": "to "}, {"type": "thinking", "text": "?"}, {"type": "text", "text": "6"}]
        return completion(text, "length" if number == "2" else "stop")

    with serving(answer) as url:
        replies = sampled(url, 9, api_key="secret")
    found = {reply.request.key: (reply.text, reply.truncated) for reply in replies if isinstance(reply, ChatCompletion)}
    assert found == {f"p{n}": ("two and two</think>4", False) if n == 3 else (f"to {n}", n == 2) for n in range(9)}
    one = next(body for body in seen if body["seed"] == 105)
    assert one == {
        "model": "judge", "messages": [{"role": "user", "content": "question 5"}], "temperature": 0.7, "top_p": 0.9,
        "max_tokens": 55, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 105,
        "path": "/v1/chat/completions", "key": "Bearer secret",
    }  # fmt: skip


def test_a_server_that_knows_no_neutral_settings_is_asked_without(caplog: pytest.LogCaptureFixture) -> None:
    """Said once, and that its own count; another refusal stays one."""

    def answer(body: dict[str, Any]) -> Reply:
        if "top_k" in body:
            return 400, {"error": "unknown argument top_k"}
        return (422, {"error": "top_k of what?"}) if body["seed"] == 100 else completion("yes")

    with serving(answer) as url:
        replies = sampled(url, 6)
    assert sum(isinstance(reply, ChatCompletion) for reply in replies) == 5
    assert caplog.text.count("the server's own top_k, min_p and repetition_penalty count") >= 1


def test_what_passes_is_retried_within_bounds_and_named_when_it_does_not_pass() -> None:
    tries: Counter[int] = Counter()

    def answer(body: dict[str, Any]) -> Reply:
        number = body["seed"] - 100
        tries[number] += 1
        if number == 0 and tries[0] < 3:
            return 503, b"busy"
        if number == 1:
            return 200, b"<html>not JSON</html>"
        if number == 2:
            return 200, {"choices": []}
        if number == 3:
            return 400, {"error": "the prompt has 9000 tokens"}
        if number == 4:
            return 401, {"error": "no key"}
        return completion("yes")

    with serving(answer) as url:
        replies = {reply.request.sample_index: reply for reply in sampled(url, 5)}
    assert isinstance(replies[0], ChatCompletion)
    failed = {n: reply for n, reply in replies.items() if isinstance(reply, FailedRequest)}
    assert {n: tries[n] for n in range(5)} == {0: 3, 1: 3, 2: 3, 3: 1, 4: 1}
    assert {n for n, reply in failed.items() if reply.permanent} == {3}
    for n, words in {
        1: "expected a chat completion, found '<html>not JSON</html>' (tried 3 times)",
        3: 'answered 400: \'{"error": "the prompt has 9000 tokens"}\'',
        4: "answered 401",
    }.items():
        assert words in failed[n].reason


def test_a_reply_that_does_not_come_or_drips_ends_at_the_time_limit() -> None:
    """The drips come within the socket's own time-out, the whole reply does not come within the request's."""
    tries: Counter[int] = Counter()
    given_up = threading.Event()

    def dripping() -> Iterator[bytes]:
        while not given_up.wait(0.05):
            yield b" "

    def stalling() -> Iterator[bytes]:
        given_up.wait(PATIENCE_S)
        yield b" "

    def answer(body: dict[str, Any]) -> Reply:
        tries[body["seed"] - 100] += 1
        if body["seed"] == 100:
            return 200, dripping()
        if body["seed"] == 102:
            return 503, dripping()
        if body["seed"] == 103:
            return 503, stalling()
        given_up.wait(PATIENCE_S)
        return completion("too late")

    with serving(answer) as url:
        replies = sampled(url, 4, timeout_s=1.5, tries=2)
        wait_until(lambda: tries == dict.fromkeys(range(4), 2), "the server to have seen each request twice")
        given_up.set()
    for reply in replies:
        assert isinstance(reply, FailedRequest) and not reply.permanent
        said = "answered 503" if reply.request.seed >= 102 else "did not answer within 1.5 s"
        assert said in reply.reason and "(tried 2 times)" in reply.reason


def test_replies_that_break_a_reader_are_no_completions() -> None:
    """Nested deeper than Python's JSON reader goes, bytes that are no text, and an empty body."""
    bodies = [b"[" * 100_000, b'{"choices": "\xff"}', b""]
    with serving(lambda body: (200, bodies[body["seed"] - 100])) as url:
        replies = sampled(url, 3, tries=1)
    assert all(isinstance(reply, FailedRequest) and "expected a chat completion" in reply.reason for reply in replies)


def test_a_count_of_tokens_that_cannot_be_is_not_known() -> None:
    counts = [-5, True, "7", 1e300, 7]
    with serving(
        lambda body: (200, {**completion("x")[1], "usage": {"completion_tokens": counts[body["seed"] - 100]}})
    ) as url:
        found = {reply.request.seed: reply for reply in sampled(url, 5)}
    assert [getattr(found[100 + n], "tokens", "failed") for n in range(5)] == [None, None, None, None, 7]


def test_a_dead_endpoint_is_given_up_soon() -> None:
    """1,000 requests to a port where nobody listens: a few dozen are tried, the rest is not even taken."""
    taken = 0

    def counted() -> Any:
        nonlocal taken
        for request in requests(1000):
            taken += 1
            yield request

    with serving(lambda body: completion("")) as url:
        pass  # closed again
    endpoint = Endpoint(url, "judge", concurrent=4, tries=2, backoff_s=0.01)
    replies = list(OpenAISampler(endpoint, SAMPLING).sample(counted()))
    assert all(isinstance(reply, FailedRequest) and "cannot be reached" in reply.reason for reply in replies)
    assert len(replies) == taken <= 24
