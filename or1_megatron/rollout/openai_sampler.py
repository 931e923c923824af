"""A model behind any OpenAI-compatible server, as a ``interfaces.Sampler``: bounded requests, bounded retries."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from typing import Any

from or1_megatron.errors import Or1Error
from or1_megatron.types import Answer, Ask, Sampling, Unanswered

_REFUSED_FOR_GOOD = frozenset({400, 413, 422})  # this question; 401, 403, 404 are of the endpoint
_WORTH_RETRYING = frozenset({408, 409, 425, 429})
_LONGEST_WAIT_S = 60.0
_GIVE_UP_AFTER = 16
"""Failures in a row, each after all its retries, that make an endpoint dead."""
_SHOWN_CHARS = 200
_LONGEST_BODY = 1 << 26


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``url`` ends before /chat/completions, as in http://host:8000/v1."""

    url: str
    model: str
    api_key: str | None = None
    concurrent: int = 64
    timeout_s: float = 600.0
    tries: int = 4
    backoff_s: float = 1.0
    """Wait before the second try; doubled each time."""


class EndpointSampler:
    """Asks over HTTP on ``concurrent`` threads.

    Time-outs, refused connections, busy servers and replies that are not what the protocol says are tried again, up to
    ``tries`` times in all. An endpoint that fails again and again is given up: what has not been asked is left.
    """

    def __init__(self, endpoint: Endpoint, sampling: Sampling) -> None:
        self._endpoint, self._sampling = endpoint, sampling

    def sample(self, asks: Iterable[Ask]) -> Iterator[Answer | Unanswered]:
        waiting = iter(asks)
        failures = 0
        with ThreadPoolExecutor(self._endpoint.concurrent, thread_name_prefix="endpoint") as threads:
            under_way: set[Future[Answer | Unanswered]] = set()
            while True:
                if failures < _GIVE_UP_AFTER:
                    room = self._endpoint.concurrent - len(under_way)
                    under_way |= {threads.submit(self._ask, ask) for ask in islice(waiting, room)}
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for reply in (future.result() for future in done):
                    failed = isinstance(reply, Unanswered) and not reply.for_good
                    failures = failures + 1 if failed else 0
                    yield reply

    def _ask(self, ask: Ask) -> Answer | Unanswered:
        reason = ""
        for attempt in range(self._endpoint.tries):
            if attempt:
                time.sleep(min(self._endpoint.backoff_s * 2 ** (attempt - 1), _LONGEST_WAIT_S))
            try:
                return self._answer(ask)
            except urllib.error.HTTPError as error:
                reason = f"{self._endpoint.url} answered {error.code}: {_shown(error.read(2000))}"
                if error.code in _REFUSED_FOR_GOOD:
                    return Unanswered(ask, reason, for_good=True)
                if error.code < 500 and error.code not in _WORTH_RETRYING:
                    return Unanswered(ask, reason, for_good=False)
            except TimeoutError:
                reason = f"{self._endpoint.url} did not answer within {self._endpoint.timeout_s:g} s"
            except (OSError, HTTPException) as error:
                reason = f"{self._endpoint.url} cannot be reached: {getattr(error, 'reason', None) or error}"
            except _Garbage as error:
                reason = f"{self._endpoint.url}: {error}"
        return Unanswered(ask, f"{reason} (tried {self._endpoint.tries} times)", for_good=False)

    def _answer(self, ask: Ask) -> Answer:
        body = {
            "model": self._endpoint.model,
            "messages": [{"role": message.role, "content": message.content} for message in ask.messages],
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "max_tokens": self._sampling.max_response_tokens,
            "seed": ask.seed,
        }
        headers = {"Content-Type": "application/json"}
        if self._endpoint.api_key:
            headers["Authorization"] = f"Bearer {self._endpoint.api_key}"
        request = urllib.request.Request(
            f"{self._endpoint.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        deadline_s = time.monotonic() + self._endpoint.timeout_s
        with urllib.request.urlopen(request, timeout=self._endpoint.timeout_s) as reply:
            return _read(ask, _body(reply, deadline_s))


class _Garbage(Or1Error, ValueError):
    """A reply that is no chat completion."""


def _body(reply: Any, deadline_s: float) -> bytes:
    """Of an HTTP reply. Raises TimeoutError behind the deadline: the socket's own time-out is of each read alone."""
    body = bytearray()
    while part := reply.read1(1 << 16):
        body += part
        if len(body) > _LONGEST_BODY:
            raise _Garbage(f"expected a chat completion, found more than {_LONGEST_BODY} bytes: {_shown(body[:2000])}")
        if time.monotonic() > deadline_s:
            raise TimeoutError
    return bytes(body)


def _read(ask: Ask, body: bytes) -> Answer:
    """The first choice. Reasoning that the server has split off is put back before its closing tag."""
    try:
        decoded = json.loads(body)
        choice: Any = decoded["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        truncated = choice["finish_reason"] == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise _Garbage(f"expected a chat completion, found {_shown(body)}") from None
    if not isinstance(text, str) or not isinstance(reasoning, str):
        raise _Garbage(f"expected a text as message.content, found {_shown(body)}")
    usage = decoded.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    text = f"{reasoning}</think>{text}" if reasoning else text
    return Answer(ask, text, truncated, tokens if isinstance(tokens, int) else None)


def _shown(body: bytes | bytearray) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")
