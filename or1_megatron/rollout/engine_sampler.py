"""Implements ``interfaces.Sampler`` with our own vLLM engines, for ``or1 eval`` and ``or1 data``; balances the load."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
import torch

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.rollout.cluster import start_ray, stop_ray
from or1_megatron.rollout.engine_group import EngineError, result_of
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.rollout.engine_thread import Harvest
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import ChatCompletion, ChatRequest, FailedRequest, Prompt, Request, Sampling
from or1_verify.types import Problem

if TYPE_CHECKING:
    from or1_megatron.data.template import ChatTemplate

_HARVEST_WAIT_S = 5.0
LINGER_S = 0.2
"""How long an engine collects completions before it returns them: a call costs as much as a dozen short responses."""
_CACHED_PROMPTS = 4096


@contextmanager
def own_engines(
    model: Path, dtype: Literal["float32", "bfloat16"], config: RolloutConfig, max_model_tokens: int
) -> Iterator[list[Any]]:
    """Start Ray and engines on the HF folder ``model``, and yield the engines' handles. The end of the block ends both.

    Args:
        max_model_tokens: tokens of the longest prompt + response.

    Raises:
        ClusterError: Ray did not start.
        EngineError: an engine did not start.
    """
    run_id = f"sampler-{uuid.uuid4().hex[:8]}"
    start_ray(None, run_id)
    with ExitStack() as stack:
        stack.callback(stop_ray)
        pool = EnginePool(config, model, dtype, max_model_tokens, run_id, on_cpu=not torch.cuda.is_available())
        stack.callback(pool.close)
        pool.wait_ready()
        yield pool.handles


class EngineSampler:
    """Sends requests to ``engine_pool.EngineActor`` handles. Raises EngineError when an engine fails or dies."""

    def __init__(
        self,
        engines: Sequence[Any],
        config: RolloutConfig,
        template: ChatTemplate,
        sampling: Sampling,
        max_prompt_tokens: int,
    ) -> None:
        """
        Args:
            config: the engines' config. ``sample`` fails if no engine completes a response in ``step_timeout_s``.
            template: makes the prompts. A reasoning tag that a prompt leaves open begins the response's text.
            max_prompt_tokens: requests with a longer prompt fail.
        """
        self._timeout_s = config.step_timeout_s
        self.engines, self._sampling = list(engines), sampling
        # The samples of a problem share its prompt, and come one round of all problems after another.
        self._prompt = lru_cache(_CACHED_PROMPTS)(
            lambda key, messages: Prompt(
                Problem(key, "", "", messages, "", {}, key), template.token_ids(messages), template.opened(messages)
            )
        )
        self._max_prompt_tokens = max_prompt_tokens
        # An engine has what it decodes at once, and half as many requests to wait. New ones are sent when half of those
        # are used up, because a call for a single request does not pay.
        self._most, self._few = config.max_concurrent * 3 // 2 + 1, config.max_concurrent * 5 // 4

    def sample(self, requests: Iterable[ChatRequest]) -> Iterator[ChatCompletion | FailedRequest]:
        waiting = iter(requests)
        in_flight: list[dict[tuple[str, int], ChatRequest]] = [{} for _ in self.engines]
        harvests: dict[Any, int] = {}  # call -> index of its engine
        exhausted = False
        completed_s = time.monotonic()
        while True:
            refused: list[FailedRequest] = []
            if not exhausted and min(map(len, in_flight)) <= self._few:
                exhausted = self._fill(waiting, in_flight, refused)
            yield from refused
            for index, engine in enumerate(self.engines):
                if in_flight[index] and index not in harvests.values():
                    harvests[engine.harvest.remote(_HARVEST_WAIT_S, LINGER_S)] = index
            if not harvests:
                return
            done, _ = ray.wait(list(harvests), num_returns=1, timeout=self._timeout_s)
            if time.monotonic() - completed_s > self._timeout_s:
                left = ", ".join(f"engine {index}: {len(sent)}" for index, sent in enumerate(in_flight) if sent)
                raise EngineError(f"no completion in {self._timeout_s:g} s; requests in flight: {left}")
            for call in done:
                index = harvests.pop(call)
                harvest: Harvest = unpack(result_of(call, index, "sample"))
                for completion in harvest.completions:
                    request = in_flight[index].pop((completion.problem_id, completion.sample_index), None)
                    completed_s = time.monotonic()
                    if request is not None:  # None: of an earlier ``sample`` whose caller stopped reading
                        text = self._prompt(request.key, request.messages).opened + completion.text
                        yield ChatCompletion(request, text, completion.truncated, completion.token_ids.size)

    def _fill(
        self,
        waiting: Iterator[ChatRequest],
        in_flight: Sequence[dict[tuple[str, int], ChatRequest]],
        refused: list[FailedRequest],
    ) -> bool:
        """Send the engines as many requests as they have room for, evenly. Returns whether no request is left."""
        batches: defaultdict[int, list[Request]] = defaultdict(list)
        request = None
        while min(map(len, in_flight)) < self._most and (request := next(waiting, None)) is not None:
            prompt = self._prompt(request.key, request.messages)
            if (tokens := len(prompt.token_ids)) > self._max_prompt_tokens:
                reason = f"{tokens} prompt tokens, more than {self._max_prompt_tokens}"
                refused.append(FailedRequest(request, reason, permanent=True))
                continue
            index = min(range(len(in_flight)), key=lambda index: len(in_flight[index]))
            in_flight[index][request.key, request.sample_index] = request
            batches[index].append(Request(prompt, request.sample_index, self._sampling, request.seed))
        calls = [(index, self.engines[index].submit.remote(pack(batch))) for index, batch in batches.items()]
        for index, call in calls:
            result_of(call, index, "take requests")
        return request is None
