"""Opens the model that ``or1 eval`` or ``or1 data build`` samples: an endpoint, or a folder on our own engines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import httpx
import torch
from rich.console import Console

from or1_megatron.config.schema import AskedModelConfig, RolloutConfig
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.data.pipeline.recipe import SampledModel
from or1_megatron.data.pipeline.steps import Say
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.evaluate.response_store import EvaluationError, settings_begun_with
from or1_megatron.evaluate.settings import PAPER_RESPONSE_TOKENS, EvaluationSettings
from or1_megatron.interfaces import Sampler
from or1_megatron.rollout.engine_pool import EngineError
from or1_megatron.rollout.engine_sampler import EngineSampler, own_engines
from or1_megatron.rollout.openai_sampler import Endpoint, OpenAISampler, UnusableProxy, http_client
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.runtime.nvidia_driver import check_driver
from or1_megatron.types import Sampling
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import BYTES, Shape
from or1_verify.types import Problem

Dtype = Literal["float32", "bfloat16"]

_BLOCK_TOKENS = 32  # of vLLM's KV cache on CPU
_LIST_TIMEOUT_S = 10.0


class LocalModel:
    """An HF model folder with its tokenizer. Construction raises DriverTooOld; ModelError if the model is unusable;
    DataError if the tokenizer is unusable."""

    def __init__(self, folder: Path) -> None:
        check_driver()
        self._folder = folder
        self.shape = Shape.of(read_hf_config(folder))
        self._template = ChatTemplate(load_tokenizer(folder))

    def longest_prompt(self, problems: Sequence[Problem], limit: int) -> int:
        """Return the length of the longest prompt of at most ``limit`` tokens; 0 if all prompts are longer."""
        lengths = (len(self._template.token_ids(problem.messages)) for problem in problems)
        return max((length for length in lengths if length <= limit), default=0)

    @contextmanager
    def sampler(
        self,
        dtype: Dtype,
        engines: RolloutConfig,
        sampling: Sampling,
        max_prompt_tokens: int,
        longest: int,
        requests: int,
        say: Say,
    ) -> Iterator[EngineSampler]:
        """Start engines, which end with the context, and yield a sampler over them. Without a GPU vLLM needs the size
        of its KV cache; if none is configured, a size is chosen and printed.

        Args:
            max_prompt_tokens: a request with a longer prompt fails.
            longest: tokens of the longest prompt + response.
            requests: the number of requests, which limits the KV cache that is needed.
        """
        if engines.kv_cache_bytes is None and not torch.cuda.is_available():
            concurrent = min(engines.max_concurrent, -(-requests // engines.engines))
            size = cpu_kv_cache_bytes(self.shape, dtype, engines, longest, concurrent, host_memory().free)
            say(f"KV cache of {size / (1 << 20):,.0f} MiB per engine, as there is no GPU (engines.kv_cache_bytes)")
            engines = engines.model_copy(update={"kv_cache_bytes": size})
        with own_engines(self._folder, dtype, engines, longest) as handles:
            yield EngineSampler(handles, engines, self._template, sampling, max_prompt_tokens)


@cache
def load_local_model(folder: Path) -> LocalModel:
    return LocalModel(folder)


def cpu_kv_cache_bytes(
    shape: Shape, dtype: Dtype, engines: RolloutConfig, longest: int, concurrent: int, free_bytes: int
) -> int:
    """Return the KV-cache bytes of one engine rank on CPU, for up to ``concurrent`` sequences of ``longest`` tokens.

    All caches together take at most half of the memory that the weights leave free. vLLM decodes fewer sequences
    at once when the cache is full.

    Raises:
        EngineError: not even one sequence fits.
    """
    ranks = engines.engines * engines.tensor_parallel
    shape = replace(shape, windowed=range(0))  # a prompt that vLLM reads at once is in the windowed layers' cache, too
    per_token = shape.kv_bytes_per_token(dtype) // max(1, min(engines.tensor_parallel, shape.kv_heads))
    sequence = -(-longest // _BLOCK_TOKENS) * _BLOCK_TOKENS * per_token
    block = _BLOCK_TOKENS * per_token  # vLLM keeps one block empty
    weights = shape.parameters * BYTES[dtype] * engines.engines
    room = (free_bytes - weights) // 2 // ranks
    if room < sequence + block:
        raise EngineError(
            f"{free_bytes / 1e9:.1f} GB of memory are free; the weights of {engines.engines} engines take "
            f"{weights / 1e9:.1f} GB, and the KV cache of one response of {longest} tokens with its prompt "
            f"{sequence / 1e9:.1f} GB in each of {ranks} engine ranks, for which half of the rest is used: lower "
            "max_response_tokens or engines.engines, or set engines.kv_cache_bytes"
        )
    return min(concurrent * sequence + block, room)


def with_length(
    settings: EvaluationSettings, model: str, problems: Sequence[Problem], out: Path, console: Console
) -> EvaluationSettings:
    """Return the settings with ``max_response_tokens`` filled in.

    If none is given, an evaluation that was begun in ``out`` keeps its length. A new evaluation takes the paper's
    length, but at most the model's context minus the longest prompt; if that limit applies, it is printed.
    """
    if settings.max_response_tokens is not None:
        return settings
    tokens = PAPER_RESPONSE_TOKENS
    if (begun := settings_begun_with(out)) is not None:
        tokens = begun.get("max_response_tokens", tokens)
    elif not _is_endpoint(model):
        local = load_local_model(_hf_folder(Path(model), out, console))
        context = local.shape.positions
        prompt = local.longest_prompt(problems, min(settings.max_prompt_tokens, context - 1))
        if context - prompt < tokens:
            tokens = context - prompt
            _say(console)(
                f"responses of up to {tokens} tokens, the model's context of {context} less the longest prompt's "
                f"{prompt} (max_response_tokens)"
            )
    return settings.model_copy(update={"max_response_tokens": tokens})


def open_model(
    model: str, settings: EvaluationSettings, problems: Sequence[Problem], requests: int, out: Path, console: Console
) -> AbstractContextManager[Sampler]:
    """Return a context with a sampler over an evaluation's model; ``requests``: the number of requests to come."""
    assert settings.max_response_tokens is not None
    sampling = Sampling(settings.temperature, settings.top_p, settings.max_response_tokens)
    if _is_endpoint(model):
        return nullcontext(_endpoint_sampler(model, settings, settings.model, settings.request_timeout_s, sampling))
    local = load_local_model(_hf_folder(Path(model), out, console))
    limit = min(settings.max_prompt_tokens, local.shape.positions - settings.max_response_tokens)
    if limit < 1:
        raise EvaluationError(
            f"max_response_tokens = {settings.max_response_tokens} leaves no room for a prompt within the model's "
            f"max_position_embeddings = {local.shape.positions}; lower it (--set max_response_tokens=...)"
        )
    longest = max(1, local.longest_prompt(problems, limit)) + settings.max_response_tokens
    return local.sampler(settings.dtype, settings.engines, sampling, limit, longest, requests, _say(console))


def open_sampler(
    model: SampledModel, sampling: Sampling, max_prompt_tokens: int, say: Say = print
) -> AbstractContextManager[Sampler]:
    """Return a context with a sampler over a data recipe's model. An endpoint itself refuses too long prompts."""
    if model.endpoint is not None:
        name = model.model or model.name
        return nullcontext(_endpoint_sampler(model.endpoint, model, name, model.timeout_s, sampling))
    assert model.hf is not None
    local, longest = LocalModel(model.hf), max_prompt_tokens + sampling.max_response_tokens
    requests = model.engines.engines * model.engines.max_concurrent
    engines = model.dtype, model.engines
    return local.sampler(
        *engines, sampling, max_prompt_tokens, longest, requests, lambda line: say(f"{model.name}: {line}")
    )


def _say(console: Console) -> Say:
    return lambda line: console.print(line, highlight=False, soft_wrap=True)


def _is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _hf_folder(model: Path, out: Path, console: Console) -> Path:
    """Return ``model`` if it is an HF folder; else convert this Megatron checkpoint to an HF folder in ``out``, and
    return that folder."""
    if (model / "config.json").is_file():
        return model
    if not model.is_dir():
        raise EvaluationError(
            f"--model {model}: no such folder; expected an HF folder, a Megatron checkpoint, or the URL of an "
            "OpenAI-compatible server (http://host:8000/v1)"
        )
    made = out / "model"
    if not (made / "config.json").is_file():
        megatron_to_hf(model, made, console)
    return made


def _endpoint_sampler(
    url: str, asked: AskedModelConfig, name: str | None, timeout_s: float, sampling: Sampling
) -> OpenAISampler:
    """Return a sampler over an endpoint. ``name`` None: the endpoint's first model. Raises EvaluationError if the key
    is not set, or if the endpoint names no model."""
    key = None if asked.api_key_variable is None else os.environ.get(asked.api_key_variable)
    if asked.api_key_variable is not None and not key:
        raise EvaluationError(f"environment variable {asked.api_key_variable}, which should hold the key, is not set")
    try:
        if name is None:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            with http_client(_LIST_TIMEOUT_S) as client:
                listed = client.get(f"{url.rstrip('/')}/models", headers=headers)
            name = str(listed.raise_for_status().json()["data"][0]["id"])
        return OpenAISampler(Endpoint(url, name, key, asked.concurrent, timeout_s, asked.tries), sampling)
    except UnusableProxy as error:
        raise EvaluationError(f"--model {url}: {error}") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise EvaluationError(
            f"--model {url}: its /models names no model ({type(error).__name__}: {error}); expected an "
            "OpenAI-compatible server, the URL up to /chat/completions (http://host:8000/v1), or --set model=NAME"
        ) from None
