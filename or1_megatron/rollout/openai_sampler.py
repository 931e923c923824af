"""Implements ``interfaces.Sampler`` with an OpenAI-compatible endpoint: bounded concurrency, bounded retries."""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from or1_megatron.types import ChatCompletion, ChatRequest, FailedRequest, Sampling
from or1_verify.errors import UserError

logger = logging.getLogger(__name__)

_PERMANENT = frozenset({400, 413, 422})
"""HTTP statuses that refuse a single request for good. 401, 403 and 404 concern the whole endpoint."""
_WORTH_RETRYING = frozenset({408, 409, 425, 429})
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with each request to override the model's generation_config.json. Some servers do not know these settings."""
_LONGEST_WAIT_S = 60.0
_GIVE_UP_AFTER = 16
"""Number of requests in a row that fail in all their tries, after which the endpoint counts as dead."""
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server. ``url`` ends before /chat/completions, as in http://host:8000/v1."""

    url: str
    model: str
    api_key: str | None = None
    concurrent: int = 64
    timeout_s: float = 600.0
    tries: int = 4
    backoff_s: float = 1.0
    """Wait before the second try. The wait is doubled before each further try."""


class UnusableProxy(UserError):
    """The environment names a proxy that httpx cannot use."""


def http_client(timeout_s: float) -> httpx.Client:
    """Return a client that trusts the machine's certificates, not certifi's. Raises UnusableProxy."""
    limits, trusted = httpx.Limits(max_connections=None), ssl.create_default_context()
    try:
        return httpx.Client(timeout=timeout_s, limits=limits, follow_redirects=True, verify=trusted)
    except (ImportError, ValueError) as error:
        raise UnusableProxy(
            f"the proxy of $ALL_PROXY or $HTTPS_PROXY: {error}; unset it, or use an HTTP proxy"
        ) from None


class OpenAISampler:
    """Sends requests over HTTP from ``concurrent`` threads.

    After a time-out, a refused connection, a busy server, or a reply that is no chat completion, a request is tried
    again, up to ``tries`` times in all. After ``_GIVE_UP_AFTER`` failed requests in a row no more requests are read.
    """

    def __init__(self, endpoint: Endpoint, sampling: Sampling) -> None:
        self._endpoint, self._sampling = endpoint, sampling
        self._neutral: Mapping[str, float] = _NEUTRAL
        key = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._client = http_client(endpoint.timeout_s)
        self._client.headers.update({"Content-Type": "application/json", **key})

    def sample(self, requests: Iterable[ChatRequest]) -> Iterator[ChatCompletion | FailedRequest]:
        waiting = iter(requests)
        failures = 0
        with ThreadPoolExecutor(self._endpoint.concurrent, thread_name_prefix="endpoint") as threads:
            in_flight: set[Future[ChatCompletion | FailedRequest]] = set()
            while True:
                if failures < _GIVE_UP_AFTER:
                    room = self._endpoint.concurrent - len(in_flight)
                    in_flight |= {threads.submit(self._send, request) for request in islice(waiting, room)}
                if not in_flight:
                    return
                done, in_flight = wait(in_flight, return_when=FIRST_COMPLETED)
                for reply in (future.result() for future in done):
                    failed = isinstance(reply, FailedRequest) and not reply.permanent
                    failures = failures + 1 if failed else 0
                    yield reply

    def _send(self, request: ChatRequest) -> ChatCompletion | FailedRequest:
        reason, sent = "", self._neutral
        for attempt in range(self._endpoint.tries):
            if attempt:
                time.sleep(min(self._endpoint.backoff_s * 2 ** (attempt - 1), _LONGEST_WAIT_S))
            try:
                status, body = self._post(request, sent)
                if httpx.codes.is_success(status):
                    return _parse(request, body)
            except httpx.TimeoutException:
                reason = f"{self._endpoint.url} did not answer within {self._endpoint.timeout_s:g} s"
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = f"{self._endpoint.url} cannot be reached: {error or type(error).__name__}"
                continue
            except ValueError as error:  # no completion
                reason = f"{self._endpoint.url}: {error}"
                continue
            reason = f"{self._endpoint.url} answered {status}: {_shown(body)}"
            if status in _PERMANENT and any(name.encode() in body for name in sent):
                if self._neutral:
                    logger.warning("%s; the server's own top_k, min_p and repetition_penalty count", reason)
                self._neutral = {}
                return self._send(request)
            if status < 500 and status not in _WORTH_RETRYING:
                return FailedRequest(request, reason, permanent=status in _PERMANENT)
        return FailedRequest(request, f"{reason} (tried {self._endpoint.tries} times)", permanent=False)

    def _post(self, request: ChatRequest, also: Mapping[str, float]) -> tuple[int, bytes]:
        """Return (HTTP status, body). The body of an error may be cut at the deadline.

        Raises TimeoutException at the deadline of the whole reply; httpx's own time-out is per read.
        """
        deadline_s = time.monotonic() + self._endpoint.timeout_s
        question = {
            "model": self._endpoint.model,
            "messages": [{"role": message.role, "content": message.content} for message in request.messages],
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "max_tokens": self._sampling.max_response_tokens,
            "seed": request.seed,
            **also,
        }
        url, body = f"{self._endpoint.url.rstrip('/')}/chat/completions", b""
        with self._client.stream("POST", url, content=json.dumps(question)) as reply:
            try:
                for part in reply.iter_bytes():
                    body += part
                    if time.monotonic() > deadline_s:
                        raise httpx.ReadTimeout("the whole reply takes too long")
            except httpx.HTTPError:
                if reply.is_success:
                    raise
            return reply.status_code, body


def _parse(request: ChatRequest, body: bytes) -> ChatCompletion:
    """Return the reply's first choice. Reasoning that the server split off is put back, with its closing tag.

    Raises ValueError for a body that is no chat completion.
    """
    try:
        decoded = json.loads(body)
        choice: Any = decoded["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        if isinstance(text, list):  # a list of parts, as some servers return it
            text = "".join(part["text"] for part in text if part.get("type", "text") == "text")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        truncated = choice["finish_reason"] == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"expected a chat completion, found {_shown(body)}") from None
    if not isinstance(text, str) or not isinstance(reasoning, str):
        raise ValueError(f"expected a text as message.content, found {_shown(body)}")
    usage = decoded.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    text = f"{reasoning}</think>{text}" if reasoning else text
    return ChatCompletion(request, text, truncated, tokens if type(tokens) is int and tokens >= 0 else None)


def _shown(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")
