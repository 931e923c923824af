"""A model folder on engines of our own, for ``or1 eval`` and ``or1 data build``: its lengths, KV cache and sampler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.rollout.engine_sampler import EngineSampler, start_engine_sampler
from or1_megatron.rollout.pool import EngineError
from or1_megatron.runtime.driver import check_driver
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.types import Problem, Sampling
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import BYTES, Shape

Dtype = Literal["float32", "bfloat16"]

_BLOCK_TOKENS = 32  # of vLLM's KV cache on CPU


class LocalModel:
    """An HF folder with its tokenizer. Raises DriverTooOld, ModelError, DataError."""

    def __init__(self, folder: Path) -> None:
        check_driver()
        self._folder = folder
        self.shape = Shape.of(read_hf_config(folder))
        self._tokenise = ChatTemplate(load_tokenizer(folder)).token_ids

    def longest_prompt(self, problems: Sequence[Problem], limit: int) -> int:
        """Return the tokens of the longest prompt among those of at most ``limit``; 0 without any."""
        lengths = (len(self._tokenise(problem.messages)) for problem in problems)
        return max((length for length in lengths if length <= limit), default=0)

    def fit_kv_cache(
        self, dtype: Dtype, engines: RolloutConfig, longest: int, requests: int
    ) -> tuple[RolloutConfig, str]:
        """Return engines with a KV cache, and what was chosen; without a GPU vLLM needs a size, if none is given.

        Args:
            longest: tokens of the longest prompt + response that will come.
            requests: how many will come; more at once need no KV cache.
        """
        if torch.cuda.is_available() or engines.kv_cache_bytes is not None:
            return engines, ""
        places = min(engines.max_concurrent, -(-requests // engines.engines))
        size = cpu_kv_cache_bytes(self.shape, dtype, engines, longest, places, host_memory().free)
        said = f"KV cache of {size / (1 << 20):,.0f} MiB per engine, as there is no GPU (engines.kv_cache_bytes)"
        return engines.model_copy(update={"kv_cache_bytes": size}), said

    def sampler(
        self, dtype: Dtype, engines: RolloutConfig, longest: int, sampling: Sampling, max_prompt_tokens: int
    ) -> AbstractContextManager[EngineSampler]:
        """Start engines for prompts + responses of ``longest`` tokens; they end with the context."""
        return start_engine_sampler(self._folder, dtype, engines, longest, self._tokenise, sampling, max_prompt_tokens)


@cache
def load_local_model(folder: Path) -> LocalModel:
    return LocalModel(folder)


def cpu_kv_cache_bytes(
    shape: Shape, dtype: Dtype, engines: RolloutConfig, longest: int, places: int, free_bytes: int
) -> int:
    """Return the KV cache of one engine rank on CPU: ``places`` sequences of ``longest`` tokens, if memory allows.

    All engines together take at most half of the memory that is free beside their weights: vLLM decodes fewer
    sequences at once when the cache is full.

    Raises:
        EngineError: not even one sequence fits.
    """
    ranks = engines.engines * engines.tensor_parallel
    per_token = shape.kv_bytes_per_token(dtype) // max(1, min(engines.tensor_parallel, shape.kv_heads))
    sequence = -(-longest // _BLOCK_TOKENS) * _BLOCK_TOKENS * per_token
    block = _BLOCK_TOKENS * per_token  # vLLM keeps one empty
    weights = shape.parameters * BYTES[dtype] * engines.engines
    room = (free_bytes - weights) // 2 // ranks
    if room < sequence + block:
        raise EngineError(
            f"{free_bytes / 1e9:.1f} GB of memory are free; the weights of {engines.engines} engines take "
            f"{weights / 1e9:.1f} GB, and the KV cache of one response of {longest} tokens with its prompt "
            f"{sequence / 1e9:.1f} GB in each of {ranks} engine ranks, for which half of the rest is used: lower "
            "max_response_tokens or engines.engines, or set engines.kv_cache_bytes"
        )
    return min(places * sequence + block, room)
